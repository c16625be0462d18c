"""The stage `export`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="export", task_run_name="export", **TASK_OPTIONS)
def export(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Write the folder that the serving engine loads."""
    return run_reported("export", config, run_id, heading="Exported draft")
