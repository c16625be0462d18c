"""Runs one stage: takes what is there and intact, or starts its step, and keeps the run's record.

No Prefect here: a task calls `run_stage` and reports what comes back.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from eagle3_core import making
from eagle3_core.config import RunConfig, Stage
from eagle3_core.errors import EXIT_BUG, Eagle3Error, StepError, StoreError
from eagle3_core.estimate.run import check_space, estimate_run, space_line
from eagle3_core.host.run_folder import RunFolder, used_by_runs
from eagle3_core.leftovers import remove_leftovers
from eagle3_core.planning import RunPlan
from eagle3_core.preflight import Check, check_settings, run_checks
from eagle3_core.probing import CHECK_NAME, check_probe
from eagle3_core.report.write import write_report
from eagle3_core.run_space import RunSpace
from eagle3_core.stage_run import Callbacks, StageOutcome, StageRun
from eagle3_core.store.collect import collect_garbage
from eagle3_core.store.disk import as_host_error, guarding, unguarded
from eagle3_core.store.open import open_store
from eagle3_core.store.uses import RunUse
from eagle3_core.target.locate import BUILTIN_TARGETS, fetch_spec, is_builtin, target_folder

NOT_RETRIED = {
    "BenchmarkError", "ConfigError", "DataError", "DiskFullError", "ExportError", "HostError",
    "MissingInputError", "ObjectAccessError", "ProbeError", "TargetError", "TrainingError",
    "VerificationError",
}  # fmt: skip
"""Errors that a second attempt would only repeat."""
logger = logging.getLogger(__name__)


class StageError(Eagle3Error):
    """A stage failed; `cause` is why."""

    def __init__(self, stage: Stage, cause: BaseException) -> None:
        if isinstance(cause, OSError):
            cause = as_host_error(cause) or cause
        self.stage, self.cause = stage, cause
        text = str(cause) if isinstance(cause, Eagle3Error) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"stage {stage} failed: {text}")
        self.exit_code = cause.exit_code if isinstance(cause, Eagle3Error) else EXIT_BUG
        self.details = dict(cause.details) if isinstance(cause, Eagle3Error) else {}

    @property
    def may_pass_next_time(self) -> bool:
        """Whether another attempt makes sense."""
        kind = self.cause.error_type if isinstance(self.cause, StepError) else type(self.cause).__name__
        return kind not in NOT_RETRIED


def run_stage(
    stage: Stage, config: RunConfig, run_id: str, callbacks: Callbacks | None = None
) -> StageOutcome:
    """Run one stage of a run whose folder exists.

    Raises:
        StageError: names the stage and the first cause.
    """
    folder, callbacks = RunFolder(config.workspace_path / "runs" / run_id), callbacks or Callbacks()
    space = RunSpace(config, folder, stage, callbacks.on_progress, callbacks.on_tick)
    with RunUse(run_id) as use, guarding(space.guard):
        return _run_stage(stage, StageRun(config, folder, callbacks, use, space))


def _run_stage(stage: Stage, run: StageRun) -> StageOutcome:
    started, spent = time.monotonic(), 0.0
    try:
        earlier = run.folder.record().stage(stage)
        attempts = earlier.attempts if earlier else 0
        spent = (earlier.seconds or 0.0) if earlier else 0.0
        begun = (earlier.started_at if earlier else None) or datetime.now(UTC)
        run.folder.update_stage(stage, state="running", started_at=begun, attempts=attempts + 1)
        outcome = _HANDLERS[stage](run)
    except Exception as error:
        failure = StageError(stage, error)
        _record_failure(run, stage, "failed", str(failure), spent + time.monotonic() - started)
        raise failure from error
    except BaseException:
        _record_failure(run, stage, "cancelled", "interrupted", spent + time.monotonic() - started)
        raise
    seconds = spent + time.monotonic() - started
    run.folder.update_stage(
        stage,
        state="completed",
        seconds=round(seconds, 3),
        reused=outcome.reused,
        artifacts=outcome.artifacts,
        message=outcome.message,
        log=_log_name(run, stage),
        details=outcome.details,
    )
    return outcome.model_copy(update={"seconds": seconds})


def _record_failure(run: StageRun, stage: Stage, state: str, message: str, seconds: float) -> None:
    """Record it where the run folder still exists; the error itself matters more.

    A cancelled run may get a signal too, from its worker: it must not leave a stage that seems to run.
    """

    def record() -> None:
        with contextlib.suppress(Eagle3Error), unguarded():
            run.folder.update_stage(
                stage, state=state, seconds=round(seconds, 3), message=message, log=_log_name(run, stage)
            )

    try:
        record()
    except BaseException:
        record()
        raise


def _log_name(run: StageRun, stage: Stage) -> str | None:
    path = run.folder.log_path(stage)
    return path.relative_to(run.folder.path).as_posix() if path.is_file() else None


def _preflight(run: StageRun) -> StageOutcome:
    """Check the host, fetch a missing built-in target, check that too, then ask the probe."""
    config = run.config
    stages = [record.stage for record in run.folder.record().stages]
    checks, error = run_checks(config, stages)
    if error is None and is_builtin(config.target.model) and not target_folder(config).is_dir():
        size = BUILTIN_TARGETS[config.target.model].bytes
        run.space.guard.make_room(config.workspace_path, size, config.target.model)
        run.step("fetch_target", fetch_spec(config))
        checks, error = run_checks(config, stages)
    if error is not None:
        raise error
    log = run.folder.log_path("probe")
    probed = check_probe(config, stages, run.folder.path / "probe", lambda spec: run.step("probe", spec), log)
    checks.append(Check(name=CHECK_NAME, ok=True, found=probed.found))
    details: dict[str, Any] = {"checks": [check.model_dump() for check in checks]}
    if probed.result is not None:
        details["probe"] = probed.result.model_dump(mode="json")
    return StageOutcome(
        stage="preflight",
        message=f"{len(checks)} checks passed; {CHECK_NAME}: {probed.found}",
        details=details,
    )


def _plan(run: StageRun) -> StageOutcome:
    """Estimate the run's bytes and minutes, refuse what does not fit, and reserve the space."""
    check_settings(run.config)
    stages = [record.stage for record in run.folder.record().stages]
    estimate = estimate_run(run.plan(), stages, run.folder.run_id)
    if run.config.limits.check_disk:
        check_space(estimate)
    elif not estimate.fits:
        for line in (space_line(one) for one in estimate.file_systems if not one.fits):
            logger.warning("%s; limits.check_disk is false, so it begins all the same", line)
    run.space.reserve(estimate)
    free = ", ".join(f"{one.free_bytes:,} free on {one.mount}" for one in estimate.file_systems)
    return StageOutcome(
        stage="plan",
        message=f"{estimate.new_bytes:,} bytes to write, {free}, roughly {estimate.total_minutes:.0f} min",
        details=estimate.model_dump(mode="json"),
    )


def _cleanup(run: StageRun) -> StageOutcome:
    """Remove what interrupted writers of this run's artifacts left, then apply the retention policies."""
    plan = run.plan()
    removed, busy = remove_leftovers(plan.store, [planned.ref for planned in plan.artifacts.values()])
    size = sum(removed.values())
    message = f"removed {len(removed)} leftover files, {size:,} bytes"
    if busy:
        message += f"; {len(busy)} folders are in use by another run"
    details: dict[str, Any] = {"removed": removed, "bytes": size, "busy": busy}
    if run.config.retention.names_something:
        told, collected = _retain(run.config, plan)
        message, details = f"{message}; {told}", details | collected
    return StageOutcome(stage="cleanup", message=message, details=details)


def _retain(config: RunConfig, plan: RunPlan) -> tuple[str, dict[str, Any]]:
    """Apply the retention policies; where that cannot be done the run is as good as without."""
    policy = config.retention
    try:
        collected = collect_garbage(
            plan.store,
            policy,
            purge_after_days=policy.purge_after_days,
            also_in_use=used_by_runs(config.workspace_path),
        )
    except StoreError as error:
        logger.warning("the retention policies were not applied: %s", error)
        return "the retention policies were not applied", {"retention_problem": str(error)}
    told = f"moved {collected.trashed_bytes:,} bytes to the trash, purged {collected.purged_bytes:,}"
    return told, {"retention": collected.model_dump(mode="json")}


def _report(run: StageRun) -> StageOutcome:
    """Write summary.json and report.html."""
    write_report(run.folder.path, open_store(run.config))
    return StageOutcome(stage="report", message=f"{run.folder.path / 'report.html'}")


_HANDLERS: dict[Stage, Callable[[StageRun], StageOutcome]] = {
    "preflight": _preflight,
    "plan": _plan,
    "prepare": making.prepare,
    "extract": making.extract,
    "verify": making.verify,
    "train": making.train,
    "export": making.make("export"),
    "benchmark": making.benchmark,
    "cleanup": _cleanup,
    "report": _report,
}
