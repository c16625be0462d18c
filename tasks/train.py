"""The stage `train`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="train", task_run_name="train", **TASK_OPTIONS)
def train(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Train the draft; an interrupted training goes on from its last checkpoint."""
    return run_reported("train", config, run_id, heading="Trained draft")
