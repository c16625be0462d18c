"""The stage `prepare`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="prepare", task_run_name="prepare", **TASK_OPTIONS)
def prepare(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Let the target answer the prompts, tokenise, map the draft vocabulary."""
    return run_reported("prepare", config, run_id, heading="Prepared data")
