"""The stage `report`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="report", task_run_name="report", **TASK_OPTIONS)
def report(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Write summary.json and report.html."""
    return run_reported("report", config, run_id, heading="Report")
