"""The stage `preflight`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="preflight", task_run_name="preflight", **TASK_OPTIONS)
def preflight(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Look at host, engine environment, target and data before anything is loaded."""
    return run_reported("preflight", config, run_id, heading="Preflight: host, engine, target and data")
