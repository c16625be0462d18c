"""The stage `extract`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="extract", task_run_name="extract", **TASK_OPTIONS)
def extract(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Capture the target's hidden states into shards; a damaged shard alone is made again."""
    return run_reported("extract", config, run_id, heading="Captured hidden states")
