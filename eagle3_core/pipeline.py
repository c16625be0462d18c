"""Runs one stage: takes what is there and intact, or starts its step, and keeps the run's record.

No Prefect here: a task calls `run_stage` and reports what comes back.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactKind, ArtifactPlan, ArtifactRef
from eagle3_core.config import RunConfig, Stage
from eagle3_core.contracts import (
    RESULT_TYPES,
    BenchmarkResult,
    ExtractResult,
    PrepareResult,
    ProgressEvent,
    StepName,
    StepSpec,
)
from eagle3_core.data.ledger import Ledger
from eagle3_core.errors import EXIT_BUG, Eagle3Error, StepError, StoreError, VerificationError
from eagle3_core.estimate.run import check_space, estimate_run, space_line
from eagle3_core.host.engine_environment import capture_engine_config
from eagle3_core.host.lines import without_secrets
from eagle3_core.host.process import run_step
from eagle3_core.host.run_folder import RunFolder, used_by_runs
from eagle3_core.leftovers import remove_leftovers
from eagle3_core.planning import STAGE_INPUTS, RunPlan, plan_run
from eagle3_core.preflight import Check, check_settings, run_checks
from eagle3_core.probing import CHECK_NAME, check_probe
from eagle3_core.report.write import write_report
from eagle3_core.run_space import RunSpace
from eagle3_core.serving.acceptance import check_acceptance
from eagle3_core.store.collect import collect_garbage
from eagle3_core.store.condemned import condemn
from eagle3_core.store.disk import as_host_error, guarding, unguarded
from eagle3_core.store.open import open_store
from eagle3_core.store.uses import RunUse
from eagle3_core.target.locate import BUILTIN_TARGETS, fetch_spec, is_builtin, target_folder

NOT_RETRIED = {
    "BenchmarkError", "ConfigError", "DataError", "DiskFullError", "ExportError", "HostError",
    "ObjectAccessError", "ProbeError", "TargetError", "VerificationError",
}  # fmt: skip
"""Errors that a second attempt would only repeat."""
logger = logging.getLogger(__name__)

MAX_LISTED = 8
CAPTURE_STEPS: tuple[StepName, ...] = ("extract", "probe")
"""Steps that run in the environment of the capture engine."""


@dataclass(frozen=True)
class Callbacks:
    """Where a stage's lines and progress go; `on_tick` may raise to end the stage."""

    on_line: Callable[[str], None] | None = None
    on_progress: Callable[[ProgressEvent], None] | None = None
    on_tick: Callable[[], None] | None = None


class StageOutcome(BaseModel):
    """What a stage made; small, it crosses Prefect."""

    model_config = ConfigDict(frozen=True)
    stage: Stage
    reused: bool = False
    artifacts: tuple[ArtifactRef, ...] = ()
    seconds: float = 0.0
    message: str = ""
    result: dict[str, Any] = Field(default={}, description="The step's result.")
    details: dict[str, Any] = Field(default={}, description="Of stages without an artifact.")


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


@dataclass(frozen=True)
class _Run:
    config: RunConfig
    folder: RunFolder
    callbacks: Callbacks
    use: RunUse
    space: RunSpace

    def plan(self) -> RunPlan:
        """Decide every id that can be known now, and note in the store that this run uses them.

        The note comes before anybody looks what is there: garbage collection leaves alone what it names.
        """
        plan = plan_run(self.config)
        self.use.say(plan.store, (planned.ref for planned in plan.artifacts.values()))
        return plan

    def step(self, name: StepName, spec: BaseModel) -> Any:
        """Run a step with this run's settings."""
        return run_step(
            name,
            spec,
            engine=capture_engine_config(self.config) if name in CAPTURE_STEPS else self.config.engine,
            folder=self.folder.log_path(name).parent,
            on_line=self.callbacks.on_line,
            on_progress=self.space.progress,
            on_tick=self.space.tick,
            timeout_seconds=self.config.limits.step_timeout_minutes * 60,
        )


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
        return _run_stage(stage, _Run(config, folder, callbacks, use, space))


def _run_stage(stage: Stage, run: _Run) -> StageOutcome:
    started = time.monotonic()
    try:
        earlier = run.folder.record().stage(stage)
        attempts = earlier.attempts if earlier else 0
        spent = (earlier.seconds or 0.0) if earlier else 0.0
        begun = (earlier.started_at if earlier else None) or datetime.now(UTC)
        run.folder.update_stage(stage, state="running", started_at=begun, attempts=attempts + 1)
        outcome = _HANDLERS[stage](run)
    except Exception as error:
        failure = StageError(stage, error)
        _record_failure(run, stage, "failed", str(failure), time.monotonic() - started)
        raise failure from error
    except BaseException:
        _record_failure(run, stage, "cancelled", "interrupted", time.monotonic() - started)
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


def _record_failure(run: _Run, stage: Stage, state: str, message: str, seconds: float) -> None:
    """Record it where the run folder still exists; the error itself matters more."""
    with contextlib.suppress(Eagle3Error), unguarded():
        spent = getattr(run.folder.record().stage(stage), "seconds", None) or 0.0
        run.folder.update_stage(
            stage, state=state, seconds=round(spent + seconds, 3), message=message, log=_log_name(run, stage)
        )


def _log_name(run: _Run, stage: Stage) -> str | None:
    path = run.folder.log_path(stage)
    return path.relative_to(run.folder.path).as_posix() if path.is_file() else None


def _preflight(run: _Run) -> StageOutcome:
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


def _plan(run: _Run) -> StageOutcome:
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


def _make(stage: StepName) -> Callable[[_Run], StageOutcome]:
    """The handler of a stage that makes artifacts through a step."""

    def handler(run: _Run) -> StageOutcome:
        plan = run.plan()
        outputs, inputs = plan.outputs(stage), plan.inputs(stage)  # type: ignore[arg-type]
        reused = _intact(plan, outputs) and not (stage == "verify" and _is_outdated(plan))
        if not reused:
            _check_not_imported(plan, stage)
            _check_inputs(plan, stage, inputs)
            _tell_of_the_trash(plan, outputs)
            _reserve(run, plan, stage)  # type: ignore[arg-type]
            spec = StepSpec(
                config=without_secrets(run.config),
                run_id=run.folder.run_id,
                target_path=str(plan.target_path),
                outputs={str(kind): planned for kind, planned in outputs.items()},
                inputs={str(kind): ref for kind, ref in inputs.items()},
            )
            run.step(stage, spec)
        return _outcome(run, plan, stage, outputs, reused)

    return handler


def _check_not_imported(plan: RunPlan, stage: str) -> None:
    """Refuse to capture what was imported: an engine of ours would make other states.

    Raises:
        StoreError: the imported capture is not intact.
    """
    if stage == "extract" and plan.config.data.capture is not None:
        raise StoreError(
            f"{plan.artifacts['capture'].ref} was imported and is not intact",
            remedy="import it again (`eagle3 capture import`): it makes only the damaged shards anew",
        )


def _tell_of_the_trash(plan: RunPlan, outputs: dict[ArtifactKind, ArtifactPlan]) -> None:
    """Say of what is about to be made anew that it could be put back; whoever moved it away decides."""
    gone = {planned.ref for planned in outputs.values() if plan.store.find(planned.ref) is None}
    for entry in plan.store.trash().entries() if gone else ():
        if entry.ref in gone:
            logger.warning(
                "%s is in the trash and is made anew: `eagle3 gc --restore %s` would put it back",
                entry.ref, entry.ref,
            )  # fmt: skip


def _reserve(run: _Run, plan: RunPlan, stage: Stage) -> None:
    """Reserve what this stage and those after it have yet to write, and wait until this stage's part fits.

    Shards and checkpoints are asked for one by one, by the steps that write them.
    """
    stages = [record.stage for record in run.folder.record().stages]
    left = stages[stages.index(stage) :] if stage in stages else [stage]
    estimate = estimate_run(plan, left, run.folder.run_id, with_options=False)
    run.space.reserve(estimate)
    if stage not in ("extract", "train"):
        needed = sum(artifact.new_bytes for artifact in estimate.artifacts if artifact.stage == stage)
        run.space.guard.make_room(run.config.store_path, needed, f"the stage {stage}")


def _prepare(run: _Run) -> StageOutcome:
    """Hold a reused dataset against the limits too; the step does it with a new one."""
    outcome = _make("prepare")(run)
    if outcome.reused:
        ledger = Ledger.of(PrepareResult.model_validate(outcome.result))
        ledger.check(run.config.data.max_rejected_fraction, is_rehearsal=run.config.limit is not None)
    return outcome


def _engines(number: int) -> str:
    return "1 engine died and was" if number == 1 else f"{number} engines died and were"


def _extract(run: _Run) -> StageOutcome:
    """Say what the engines went through beside what they made."""
    outcome = _make("extract")(run)
    result = ExtractResult.model_validate(outcome.result)
    message = outcome.message
    if result.num_restarts and not outcome.reused:
        message += f"; {_engines(result.num_restarts)} replaced"
    if result.quarantined:
        keys = ", ".join(one.key for one in result.quarantined[:MAX_LISTED])
        message += f"; {len(result.quarantined)} samples quarantined ({keys})"
    details = {"quarantined": [one.model_dump() for one in result.quarantined]} if result.quarantined else {}
    return outcome.model_copy(update={"message": message, "details": details})


def _verify(run: _Run) -> StageOutcome:
    """Check sizes and hashes of the capture first, without an engine; what is damaged is made anew."""
    plan = run.plan()
    capture = plan.store.read(plan.inputs("verify")["capture"])
    problems = plan.store.problems(capture)
    if problems:
        condemn(plan.store, capture, problems)
        raise VerificationError(
            f"{len(problems)} of {len(capture.files)} shards of {capture.ref} are damaged: {_some(problems)}",
            remedy="run the stages extract and verify again: extract makes these anew and keeps the others",
            details={"condemned": [{"shard": name, "reason": why} for name, why in problems.items()]},
        )
    return _make("verify")(run)


def _train(run: _Run) -> StageOutcome:
    """Refuse states that were made again after they had been verified."""
    plan = run.plan()
    refs = plan.inputs("train")
    if _is_outdated(plan):
        raise StoreError(
            f"{refs['verification']} is older than the files of {refs['capture']}: some were made again",
            remedy="run the stage verify first (`--stages verify,train`)",
        )
    return _make("train")(run)


def _is_outdated(plan: RunPlan) -> bool:
    """Whether there is a verification of other files than those that the capture has now."""
    capture, verification = plan.manifest("capture"), plan.manifest("verification")
    if capture is None or verification is None:
        return False
    return verification.facts.get("capture_content") != capture.content


def _benchmark(run: _Run) -> StageOutcome:
    """Hold the result, new or reused, against the limits; one below them is recorded all the same."""
    outcome = _make("benchmark")(run)
    run.folder.update_stage("benchmark", artifacts=outcome.artifacts, reused=outcome.reused)
    check_acceptance(BenchmarkResult.model_validate(outcome.result), run.config)
    return outcome


def _cleanup(run: _Run) -> StageOutcome:
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


def _report(run: _Run) -> StageOutcome:
    """Write summary.json and report.html."""
    write_report(run.folder.path, open_store(run.config))
    return StageOutcome(stage="report", message=f"{run.folder.path / 'report.html'}")


def _intact(plan: RunPlan, outputs: dict[ArtifactKind, ArtifactPlan]) -> bool:
    """Whether the needed outputs are complete, match their hashes, and the last one carries a result."""
    needed = _needed(outputs)
    manifests = [plan.store.find(planned.ref) for kind, planned in outputs.items() if kind in needed]
    if any(manifest is None or manifest.state != "complete" for manifest in manifests):
        return False
    last = manifests[-1]
    return (
        last is not None
        and "result" in last.facts
        and not any(plan.store.problems(manifest) for manifest in manifests if manifest)
    )


def _needed(outputs: dict[ArtifactKind, ArtifactPlan]) -> set[ArtifactKind]:
    """Outputs without which a stage is not done: those that another stage reads, and the last one.

    The answers behind an intact dataset may be missing or damaged: generated anew they would not be those
    that the dataset was made from.
    """
    return {kind for kinds in STAGE_INPUTS.values() for kind in kinds} | {list(outputs)[-1]}


def _check_inputs(plan: RunPlan, stage: str, inputs: dict[ArtifactKind, ArtifactRef]) -> None:
    """Refuse to start a step on damaged inputs.

    Raises:
        StoreError: lists the files.
    """
    for kind, ref in inputs.items():
        problems = plan.store.problems(plan.store.read(ref))
        if problems:
            raise StoreError(
                f"the stage {stage} cannot use {ref}: {_some(problems)}",
                remedy=f"run the stage that makes the {kind} again: it makes only these files anew",
            )


def _outcome(
    run: _Run, plan: RunPlan, stage: StepName, outputs: dict[ArtifactKind, ArtifactPlan], reused: bool
) -> StageOutcome:
    """Read the stage's result back from the store: the same for a new and a reused one."""
    needed = [plan.store.read(outputs[kind].ref) for kind in outputs if kind in _needed(outputs)]
    others = [plan.store.find(outputs[kind].ref) for kind in outputs if kind not in _needed(outputs)]
    manifests = [*filter(None, others), *needed]
    result = RESULT_TYPES[stage].model_validate(manifests[-1].facts.get("result"))
    verb = "reused, hashes match" if reused else "made"
    return StageOutcome(
        stage=stage,  # type: ignore[arg-type]
        reused=reused,
        artifacts=tuple(manifest.ref for manifest in manifests),
        message=f"{verb}: {manifests[-1].ref}, {sum(manifest.bytes for manifest in manifests):,} bytes",
        result=result.model_dump(mode="json"),
    )


def _some(problems: dict[str, str]) -> str:
    listed = list(problems.values())
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return "; ".join(listed[:MAX_LISTED]) + more


_HANDLERS: dict[Stage, Callable[[_Run], StageOutcome]] = {
    "preflight": _preflight,
    "plan": _plan,
    "prepare": _prepare,
    "extract": _extract,
    "verify": _verify,
    "train": _train,
    "export": _make("export"),
    "benchmark": _benchmark,
    "cleanup": _cleanup,
    "report": _report,
}
