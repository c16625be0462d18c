"""What every stage's task has in common."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE

from eagle3_core.config import RunConfig, Stage
from eagle3_core.pipeline import StageError, StageOutcome, run_stage
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
    with reporter.core_log():
        outcome = run_stage(stage, config, run_id, reporter.callbacks)
    reporter.finish(outcome, outcome_markdown(outcome, heading))
    return outcome.model_dump(mode="json", exclude={"details", "result"})


def outcome_markdown(outcome: StageOutcome, heading: str) -> str:
    """The stage's artifact page: what it is, what it made, and every figure of its result."""
    rows = [
        ("outcome", outcome.message),
        ("seconds", f"{outcome.seconds:.1f}"),
        *((ref.kind, f"`{ref}`") for ref in outcome.artifacts),
        *_figures(outcome.result),
        *_figures(outcome.details),
    ]
    table = "\n".join(f"| {name} | {_cell(text)} |" for name, text in rows)
    return f"## {heading}\n\n| | |\n|---|---|\n{table}\n"


def _figures(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Numbers and words of a result; long lists as their length."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _figures(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            rows.append((prefix + name, f"{len(value)} entries"))
        elif isinstance(value, float):
            rows.append((prefix + name, f"{value:,.4g}"))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((prefix + name, f"{value:,}"))
        elif value is not None:
            rows.append((prefix + name, str(value)))
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:400]
