"""Stages that make artifacts: take what is there and intact, or start the step, and say what came out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from eagle3_core.artifacts import ArtifactKind, ArtifactPlan, ArtifactRef
from eagle3_core.config import Stage
from eagle3_core.contracts import (
    RESULT_TYPES,
    BenchmarkResult,
    ExtractResult,
    PrepareResult,
    StepName,
    StepSpec,
    TrainResult,
)
from eagle3_core.data.ledger import Ledger
from eagle3_core.errors import FolderInUseError, StoreError, VerificationError
from eagle3_core.estimate.run import estimate_run
from eagle3_core.host.redaction import without_secrets
from eagle3_core.notices import resumed_at
from eagle3_core.planning import STAGE_INPUTS, RunPlan
from eagle3_core.report.figures import format_number_of
from eagle3_core.serving.acceptance import check_acceptance
from eagle3_core.stage_run import StageOutcome, StageRun
from eagle3_core.store.condemned import condemn
from eagle3_core.store.locks import folder_lock

MAX_LISTED = 8
POLL_SECONDS = 1.0
logger = logging.getLogger(__name__)


def make(stage: StepName) -> Callable[[StageRun], StageOutcome]:
    """The handler of a stage that makes artifacts through a step."""

    def handler(run: StageRun) -> StageOutcome:
        plan = run.plan()
        outputs, inputs = plan.outputs(stage), plan.inputs(stage)  # type: ignore[arg-type]
        reused = _is_there(plan, stage, outputs)
        if not reused and stage != "extract":  # which several runs may share
            reused = _wait_for_others(run, plan, outputs) and _is_there(plan, stage, outputs)
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


def _is_there(plan: RunPlan, stage: StepName, outputs: dict[ArtifactKind, ArtifactPlan]) -> bool:
    return _intact(plan, outputs) and not (stage == "verify" and _is_outdated(plan))


def _wait_for_others(run: StageRun, plan: RunPlan, outputs: dict[ArtifactKind, ArtifactPlan]) -> bool:
    """Wait while another run makes what this stage would make; returns whether one did.

    It may take as long as a step may; then the step itself says who holds the folder.
    """
    deadline = time.monotonic() + run.config.limits.step_timeout_minutes * 60
    told = ""
    while (holder := _holder(plan, outputs)) and time.monotonic() < deadline:
        if not told:
            logger.warning("%s; waiting for it", holder)
        told = holder
        run.space.tick()
        time.sleep(POLL_SECONDS)
    return bool(told)


def _holder(plan: RunPlan, outputs: dict[ArtifactKind, ArtifactPlan]) -> str:
    """Says who holds a folder of these artifacts; empty if nobody does."""
    for planned in outputs.values():
        folder = plan.store.folder(planned.ref)
        try:
            if folder.is_dir():
                with folder_lock(folder, wait_seconds=0.0):
                    pass
        except FolderInUseError as error:
            return error.found
    return ""


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


def _reserve(run: StageRun, plan: RunPlan, stage: Stage) -> None:
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


def prepare(run: StageRun) -> StageOutcome:
    """Hold a reused dataset against the limits too; the step does it with a new one."""
    outcome = make("prepare")(run)
    if outcome.reused:
        ledger = Ledger.of(PrepareResult.model_validate(outcome.result))
        ledger.check(run.config.data.max_rejected_fraction, is_rehearsal=run.config.limit is not None)
    return outcome


def _engines(number: int) -> str:
    return "1 engine died and was" if number == 1 else f"{number} engines died and were"


def _shards(result: ExtractResult) -> str:
    kept = result.num_shards - result.num_new_shards
    return f"{format_number_of(result.num_new_shards, 'shard')} made, {kept:,} kept"


def extract(run: StageRun) -> StageOutcome:
    """Say what the engines went through beside what they made."""
    outcome = make("extract")(run)
    result = ExtractResult.model_validate(outcome.result)
    message = outcome.message
    if not outcome.reused:
        message += f"; {_shards(result)}"
        if result.num_restarts:
            message += f"; {_engines(result.num_restarts)} replaced"
    if result.quarantined:
        keys = ", ".join(one.key for one in result.quarantined[:MAX_LISTED])
        message += f"; {len(result.quarantined)} samples quarantined ({keys})"
    details = {"quarantined": [one.model_dump() for one in result.quarantined]} if result.quarantined else {}
    return outcome.model_copy(update={"message": message, "details": details})


def verify(run: StageRun) -> StageOutcome:
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
    return make("verify")(run)


def train(run: StageRun) -> StageOutcome:
    """Refuse states that were made again after they had been verified; say how training went."""
    plan = run.plan()
    refs = plan.inputs("train")
    if _is_outdated(plan):
        raise StoreError(
            f"{refs['verification']} is older than the files of {refs['capture']}: some were made again",
            remedy="run the stage verify first (`--stages verify,train`)",
        )
    outcome = make("train")(run)
    result = TrainResult.model_validate(outcome.result)
    message = outcome.message
    if result.resumed_from_step is not None and not outcome.reused:
        message += f"; {resumed_at(result.resumed_from_step, result.num_planned_steps)}"
    if result.early_stop:
        message += f"; {result.early_stop}"
    return outcome.model_copy(update={"message": message})


def _is_outdated(plan: RunPlan) -> bool:
    """Whether there is a verification of other files than those that the capture has now."""
    capture, verification = plan.manifest("capture"), plan.manifest("verification")
    if capture is None or verification is None:
        return False
    return verification.facts.get("capture_content") != capture.content


def benchmark(run: StageRun) -> StageOutcome:
    """Hold the result, new or reused, against the limits; one below them is recorded all the same."""
    outcome = make("benchmark")(run)
    run.folder.update_stage("benchmark", artifacts=outcome.artifacts, reused=outcome.reused)
    check_acceptance(BenchmarkResult.model_validate(outcome.result), run.config)
    return outcome


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
    run: StageRun, plan: RunPlan, stage: StepName, outputs: dict[ArtifactKind, ArtifactPlan], reused: bool
) -> StageOutcome:
    """Read the stage's result back from the store: the same for a new and a reused one."""
    needed = [plan.store.read(outputs[kind].ref) for kind in outputs if kind in _needed(outputs)]
    others = [plan.store.find(outputs[kind].ref) for kind in outputs if kind not in _needed(outputs)]
    manifests = [*filter(None, others), *needed]
    result = RESULT_TYPES[stage].model_validate(manifests[-1].facts.get("result"))
    verb = "reused, hashes match" if reused else "made"
    beside = len(manifests) - 1
    more = f" and {beside} other{'s' if beside > 1 else ''}" if beside else ""
    return StageOutcome(
        stage=stage,  # type: ignore[arg-type]
        reused=reused,
        artifacts=tuple(manifest.ref for manifest in manifests),
        message=f"{verb}: {manifests[-1].ref}{more}, {sum(manifest.bytes for manifest in manifests):,} bytes",
        result=result.model_dump(mode="json"),
    )


def _some(problems: dict[str, str]) -> str:
    listed = list(problems.values())
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return "; ".join(listed[:MAX_LISTED]) + more
