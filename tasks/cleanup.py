"""The stage `cleanup`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="cleanup", task_run_name="cleanup", **TASK_OPTIONS)
def cleanup(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Remove what interrupted writers of this run's artifacts left."""
    return run_reported("cleanup", config, run_id, heading="Cleanup")
