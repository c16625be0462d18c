"""The stage `benchmark`."""

from __future__ import annotations

from typing import Any

from prefect import task

from eagle3_core.config import RunConfig
from tasks.stage import TASK_OPTIONS, run_reported


@task(name="benchmark", task_run_name="benchmark", **TASK_OPTIONS)
def benchmark(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Measure acceptance and speed in the serving engine."""
    return run_reported("benchmark", config, run_id, heading="Benchmark in the serving engine")
