"""The step `train`: a draft from a capture, checked before the first optimizer step."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from eagle3_core.config import RunConfig
from eagle3_core.contracts import METRICS_FILE, Rejection, StepSpec, TrainResult
from eagle3_core.sections import TrainConfig
from eagle3_core.store.dataset import benchmark_samples
from eagle3_core.store.disk import make_room
from eagle3_core.store.files import write_atomic
from eagle3_core.store.labels import LabelSource
from eagle3_core.store.local import ArtifactWriter, LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.target.info import inspect_target
from eagle3_core.target.weights import FinalHead
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.draft import build_draft, checkpoint_tensors, initialise, trained_parameters
from eagle3_core.training.evaluate import Evaluation, HeldoutEvaluator, steps_to_unroll
from eagle3_core.training.gather import gather
from eagle3_core.training.inputs import Inputs, read_inputs
from eagle3_core.training.labels import make_labels
from eagle3_core.training.launch import count_ranks, run_ranks
from eagle3_core.training.loader import PackReader, SampleIndex
from eagle3_core.training.loop import Evaluate, Outcome, Trainer
from eagle3_core.training.metrics_log import MetricsLog
from eagle3_core.training.ranks import Ranks
from eagle3_core.training.tensorboard import EventFiles, event_files
from eagle3_core.training.weights import Mode, choose_mode, hold_weights

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3_core.step import Progress
    from eagle3_core.training.loss import Teacher

logger = logging.getLogger(__name__)
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
INITIAL_SAMPLES = 16
INITIAL_TOKENS = 8192
"""The states of so many samples, and of at most so many tokens, give the scale of the initial weights."""


def run(spec: StepSpec, progress: Progress) -> TrainResult:
    """Train a draft on a capture, or go on where an interrupted run stopped; on all GPUs that can share it.

    Inputs are capture, vocabulary, dataset and, if there is one, verification; outputs are the
    labels of the capture and the checkpoint.

    Raises:
        TrainingError: inputs that do not fit the configuration, an empty split, a loss that is not finite, or
            a rank that failed or was killed.
        StoreError: an input is missing, or somebody else writes the checkpoint.
    """
    count = count_ranks(spec.config)
    if count > 1:
        return run_ranks(spec, progress, count)
    return train_rank(spec, progress, Ranks())


def train_rank(spec: StepSpec, progress: Progress, ranks: Ranks) -> TrainResult:
    """Train as one of several ranks, or alone; see `run`. All ranks return the same but for speed.

    Args:
        spec: the same on all ranks.
        progress: called on the first rank.
        ranks: that share training, all on one host and over one store.
    """
    started = time.monotonic()
    store = open_store(spec.config)
    target = inspect_target(Path(spec.target_path))
    inputs = ranks.in_turn(lambda: read_inputs(spec.config, target, store, spec.inputs))
    if ranks.is_first:
        _log_skipped(inputs.index.skipped)
    with contextlib.ExitStack() as stack:
        plan, writer = spec.outputs["checkpoint"], None
        if ranks.is_first:
            writer = stack.enter_context(store.writer(plan, spec.run_id))
        is_complete = ranks.agree_whether(writer is not None and writer.is_complete)
        if is_complete:
            return TrainResult.model_validate(store.read(plan.ref).facts["result"])
        draft, trainer = _trainer(spec, store, inputs, writer, progress, ranks)
        logger.info(
            "training %s parameters on %d samples, %d held out, %d steps, %d ranks; ready after %.1f s",
            f"{sum(p.numel() for p in trainer.weights.parameters.values()):,}",
            len(inputs.index.splits["train"]),
            len(inputs.index.splits["heldout"]),
            trainer.num_steps,
            ranks.size,
            time.monotonic() - started,
        )
        outcome = trainer.run()
        result = _result(draft, spec.config, outcome, inputs.index)
        tensors = gather(checkpoint_tensors(draft))
        ranks.wait()  # nobody needs the resumable checkpoints any more
        if writer is not None:
            progress(0, 1 + len(result.kept), "files", "writing the draft", force=True)
            _complete(writer, draft, tensors, result, time.monotonic() - started)
            trainer.resume.remove(keep=[one.file for one in result.kept])
    return result


def _trainer(
    spec: StepSpec,
    store: LocalStore,
    inputs: Inputs,
    writer: ArtifactWriter | None,
    progress: Progress,
    ranks: Ranks,
) -> tuple[Eagle3DraftModel, Trainer]:
    """A new draft, its weights on all ranks, and what trains them."""
    config, plan = spec.config, spec.outputs["checkpoint"]
    labels = _labels(spec, store, inputs, progress, ranks)
    device = torch.device(config.engine.device)
    train_split = inputs.index.splits["train"]
    reader = PackReader(inputs.source, train_split, config.train.ttt_steps, labels, device)
    draft = build_draft(config, inputs.target, inputs.vocabulary)
    first = reader.pack(_first_samples(reader))
    initialise(draft, first.aux_states, config.train.seed)
    draft.to(config.engine.device)
    evaluate = _evaluation(config, inputs, labels, draft, ranks)
    weights = hold_weights(draft, ranks, _mode(config.train, draft), draft.device)
    folder = store.folder(plan.ref)
    resume, metrics = ResumeFolder(folder, plan), None
    if writer is not None:
        keep_last = config.train.keep_last
        resume = ResumeFolder(folder, plan, writer.save_progress, keep_last, writer.check_held)
        metrics = MetricsLog(folder, _event_files(spec))
    return draft, Trainer(draft, weights, config, reader, evaluate, resume, metrics, progress, ranks)


def _labels(
    spec: StepSpec, store: LocalStore, inputs: Inputs, progress: Progress, ranks: Ranks
) -> LabelSource:
    """The labels of the capture; the first rank makes those that are missing, and the others wait for it."""
    plan = spec.outputs["labels"]
    if ranks.is_first:
        make_labels(
            store, plan, spec.run_id, inputs.source, inputs.capture, inputs.vocabulary,
            lambda: FinalHead(inputs.target, spec.config.engine.device), progress,
        )  # fmt: skip
    ranks.wait()
    return LabelSource(store, store.read(plan.ref))


def _mode(train: TrainConfig, draft: Eagle3DraftModel) -> Mode:
    """How several ranks hold the weights."""
    device = draft.device
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    num_parameters = sum(parameter.numel() for parameter in trained_parameters(draft).values())
    return choose_mode(train, num_parameters, memory)


def _first_samples(reader: PackReader) -> list[int]:
    """The samples that scale the draft: the first one always, more while they are few and short."""
    chosen, tokens = [0], reader.samples[0].num_tokens
    for index, sample in enumerate(reader.samples[1:INITIAL_SAMPLES], start=1):
        tokens += sample.num_tokens
        if tokens > INITIAL_TOKENS:
            break
        chosen.append(index)
    return chosen


def _log_skipped(skipped: Sequence[Rejection]) -> None:
    for rejection in skipped:
        logger.warning("leaving out sample %s: %s", rejection.key, rejection.reason)


def _evaluation(
    config: RunConfig, inputs: Inputs, labels: LabelSource, draft: Eagle3DraftModel, ranks: Ranks
) -> Evaluate:
    """The function that looks at the held-out split."""
    device, heldout = draft.device, inputs.index.splits["heldout"]
    usable = {sample.key for sample in heldout}
    chosen = [sample.key for sample in benchmark_samples(inputs.samples, config.benchmark.num_prompts)]
    evaluator = HeldoutEvaluator(
        PackReader(inputs.source, heldout, steps_to_unroll(config), labels, draft.device),
        config,
        [key for key in chosen if key in usable],
        ranks,
    )
    target_ids = torch.from_numpy(inputs.vocabulary.draft_to_target).to(device)

    def evaluate(model: Eagle3DraftModel, teacher: Teacher, tell: Callable[[str], None]) -> Evaluation:
        return evaluator.evaluate(model, teacher, target_ids, tell)

    return evaluate


def _event_files(spec: StepSpec) -> EventFiles | None:
    """TensorBoard's files in the run's folder, if the run has one."""
    run_folder = spec.config.workspace_path / "runs" / spec.run_id
    if not spec.config.train.tensorboard or not run_folder.is_dir():
        return None
    return event_files(run_folder / "tensorboard")


def _result(draft: Eagle3DraftModel, config: RunConfig, outcome: Outcome, index: SampleIndex) -> TrainResult:
    history, meter = outcome.history, outcome.meter
    return TrainResult(
        num_steps=outcome.num_steps,
        num_parameters=sum(parameter.numel() for parameter in trained_parameters(draft).values()),
        resumed_from_step=outcome.resumed_from_step,
        num_planned_steps=outcome.num_planned_steps,
        tokens_per_second=meter.tokens_per_second,
        warm_up_seconds=meter.warm_up_seconds,
        epochs=[look for look in history.looks if look.is_epoch_end],
        best_epoch=history.looks[history.best].epoch,
        replay=history.benchmarks[history.best],
        num_skipped_samples=len(index.skipped),
        evaluations=history.looks,
        kept=history.kept(config.train.keep_best, WEIGHTS_FILE),
        early_stop=outcome.early_stop,
        num_empty_packs=history.num_empty_packs,
        num_skipped_steps=history.recent.num_skipped,
        num_spikes=history.recent.num_spikes,
        data_wait_share=meter.data_wait_share,
        mfu=meter.mfu,
        peak_memory_bytes=meter.peak_memory_bytes,
    )


def _complete(
    writer: ArtifactWriter,
    draft: Eagle3DraftModel,
    tensors: dict[str, Tensor],
    result: TrainResult,
    seconds: float,
) -> None:
    """Write the finished draft and mark the artifact complete, which also removes the resume files."""
    weights, config = writer.folder / WEIGHTS_FILE, writer.folder / CONFIG_FILE
    content = save(tensors, metadata={"format": "pt"})
    make_room(writer.folder, len(content), weights.name)
    write_atomic(weights, content)
    write_atomic(config, json.dumps(draft.config.to_dict(), indent=1, default=str))
    others = [writer.folder / one.file for one in result.kept[1:]]
    writer.complete(
        [weights, config, writer.folder / METRICS_FILE, *others],
        seconds=seconds,
        result=result.model_dump(mode="json"),
    )
