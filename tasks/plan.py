"""The stage `plan`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="plan", task_run_name="plan", **TASK_OPTIONS)
def plan(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Estimate bytes and minutes and refuse a run that does not fit."""
    return run_reported("plan", config, run_id, heading="Plan: bytes and minutes")
