"""What every stage's task has in common."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE

from eagle3_core.config import RunConfig, Stage
from eagle3_core.pipeline import StageError, run_stage
from eagle3_core.store.open import open_store
from tasks.reporting import StageReporter
from tasks.terminal import terminal


def retry_if_useful(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's retry condition: not for errors that another attempt would only repeat."""
    error = state.result(raise_on_failure=False)
    return not isinstance(error, StageError) or error.may_pass_next_time


TASK_OPTIONS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retry_condition_fn": retry_if_useful,
}
"""The store decides what is reused: it knows identities and hashes, Prefect's cache does not."""


def run_reported(stage: Stage, config: RunConfig, run_id: str, heading: str) -> dict[str, Any]:
    """Run a stage, report it, and return its outcome as small JSON.

    Raises:
        StageError: names the stage and the first cause.
        RunCancelled: the run was cancelled, perhaps before this stage began.
    """
    reporter = StageReporter(stage)
    reporter.tick()
    terminal().stage_started(stage)
    try:
        with reporter.core_log():
            outcome = run_stage(stage, config, run_id, reporter.callbacks)
    except StageError as error:
        reporter.fail(error)
        raise
    reporter.finish(outcome, heading, open_store(config))
    return outcome.model_dump(mode="json", exclude={"details", "result"})
