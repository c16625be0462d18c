"""The stage `verify`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="verify", task_run_name="verify", **TASK_OPTIONS)
def verify(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Check the shards' hashes, then whether the states mean what they claim."""
    return run_reported("verify", config, run_id, heading="Verification of the capture")
