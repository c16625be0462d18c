"""The step `train`: a draft from a capture, checked before the first optimizer step."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from eagle3_core.config import RunConfig
from eagle3_core.contracts import METRICS_FILE, Rejection, StepSpec, TrainResult
from eagle3_core.data.vocabulary import DraftVocabulary, load_vocabulary
from eagle3_core.errors import TrainingError
from eagle3_core.identity import draft_vocab_size
from eagle3_core.store.dataset import Sample, benchmark_samples, read_dataset
from eagle3_core.store.disk import make_room
from eagle3_core.store.files import write_atomic
from eagle3_core.store.labels import LabelSource
from eagle3_core.store.local import ArtifactWriter, LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.store.samples import SampleSource, open_samples
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.layers import final_layer_id, resolve_aux_layer_ids
from eagle3_core.target.weights import FinalHead
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.draft import build_draft, checkpoint_tensors, initialise, trained_parameters
from eagle3_core.training.evaluate import Evaluation, HeldoutEvaluator, steps_to_unroll
from eagle3_core.training.labels import make_labels
from eagle3_core.training.loader import PackReader, SampleIndex, index_samples
from eagle3_core.training.loop import Outcome, Trainer
from eagle3_core.training.metrics_log import MetricsLog
from eagle3_core.training.tensorboard import EventFiles, event_files

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
    """Train a draft on a capture, or go on where an interrupted run stopped.

    Inputs are capture, vocabulary, dataset and, if there is one, verification; outputs are the
    labels of the capture and the checkpoint.

    Raises:
        TrainingError: inputs that do not fit the configuration, an empty split, or a loss that is not finite.
        StoreError: an input is missing, or somebody else writes the checkpoint.
    """
    started = time.monotonic()
    store = open_store(spec.config)
    target = inspect_target(Path(spec.target_path))
    capture = store.read(spec.inputs["capture"])
    samples = read_dataset(store.fetch(spec.inputs["dataset"]))
    vocabulary = load_vocabulary(store.fetch(spec.inputs["vocabulary"]))
    source = open_samples(spec.config, store, capture)
    check_inputs(spec.config, target, samples, vocabulary, source)
    index = index_samples(samples, source, _bad_samples(store, spec))
    _log_skipped(index.skipped)
    with store.writer(spec.outputs["checkpoint"], spec.run_id) as writer:
        if writer.is_complete:
            return TrainResult.model_validate(writer.facts["result"])
        keep_last = spec.config.train.keep_last
        resume = ResumeFolder(writer.folder, spec.outputs["checkpoint"], writer.save_progress, keep_last)
        metrics = MetricsLog(writer.folder, _event_files(spec))
        labels = _labels(spec, store, target, source, vocabulary, progress)
        reader = PackReader(source, index.splits["train"], spec.config.train.ttt_steps, labels)
        draft = build_draft(spec.config, target, vocabulary)
        first = reader.pack(_first_samples(reader))
        initialise(draft, first.aux_states, spec.config.train.seed)
        draft.to(spec.config.engine.device)
        trainer = Trainer(
            draft,
            spec.config,
            reader,
            _evaluation(spec.config, samples, index, reader, vocabulary, draft),
            resume,
            metrics,
            progress,
        )
        logger.info(
            "training %s parameters on %d samples, %d held out, %d steps; ready after %.1f s",
            f"{sum(p.numel() for p in trainer.parameters.values()):,}",
            len(index.splits["train"]),
            len(index.splits["heldout"]),
            trainer.num_steps,
            time.monotonic() - started,
        )
        outcome = trainer.run()
        metrics.close()
        result = _result(draft, spec.config, outcome, index)
        _complete(writer, draft, result, time.monotonic() - started)
        resume.remove(keep=[one.file for one in result.kept])
    return result


def check_inputs(
    config: RunConfig,
    target: TargetInfo,
    samples: Sequence[Sample],
    vocabulary: DraftVocabulary,
    source: SampleSource,
) -> None:
    """Refuse inputs that do not fit, before anything is loaded.

    Raises:
        TrainingError: names what was found and what the configuration and the target say.
        StoreError: a shard cannot be read.
    """
    wanted_ids = resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers)
    for shard in source.load().values():
        _require(f"the auxiliary capture ids of {shard.name}", shard.aux_layer_ids, wanted_ids)
        final = final_layer_id(target.num_layers)
        _require(f"the final capture id of {shard.name}", shard.final_layer_id, final)
        _require(f"the hidden size of {shard.name}", shard.hidden_size, target.hidden_size)
    sizes = (len(vocabulary.d2t), len(vocabulary.t2d))
    _require(
        "the sizes of the draft vocabulary (draft, target)",
        sizes,
        (draft_vocab_size(config, target), target.vocab_size),
    )
    largest = max(int(sample.input_ids.max()) for sample in samples)
    if largest >= target.vocab_size:
        raise TrainingError(
            f"the dataset has token id {largest:,}", expected=f"ids below the target's {target.vocab_size:,}"
        )


def _require(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise TrainingError(
            f"{what}: {found}",
            expected=f"{expected} by the configuration and the target",
            remedy="run the stages prepare and extract again with this configuration",
        )


def _labels(
    spec: StepSpec,
    store: LocalStore,
    target: TargetInfo,
    source: SampleSource,
    vocabulary: DraftVocabulary,
    progress: Progress,
) -> LabelSource:
    """The labels of the capture, made if they are not there."""
    capture = store.read(spec.inputs["capture"])
    return make_labels(
        store, spec.outputs["labels"], spec.run_id, source, capture, vocabulary,
        lambda: FinalHead(target, spec.config.engine.device), progress,
    )  # fmt: skip


def _bad_samples(store: LocalStore, spec: StepSpec) -> dict[str, str]:
    """Key and problem of samples that verification found bad."""
    if "verification" not in spec.inputs:
        return {}
    result = store.read(spec.inputs["verification"]).facts["result"]
    return {bad["key"]: bad["problem"] for bad in result["bad_samples"]}


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
    config: RunConfig,
    samples: Sequence[Sample],
    index: SampleIndex,
    training: PackReader,
    vocabulary: DraftVocabulary,
    draft: Eagle3DraftModel,
) -> Any:
    """The function that looks at the held-out split."""
    device = draft.device
    usable = {sample.key for sample in index.splits["heldout"]}
    chosen = [sample.key for sample in benchmark_samples(samples, config.benchmark.num_prompts)]
    evaluator = HeldoutEvaluator(
        PackReader(training.source, index.splits["heldout"], steps_to_unroll(config), training.labels),
        config,
        [key for key in chosen if key in usable],
    )
    target_ids = torch.from_numpy(vocabulary.draft_to_target).to(device)

    def evaluate(model: Eagle3DraftModel, teacher: Teacher) -> Evaluation:
        return evaluator.evaluate(model, teacher, target_ids)

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
        tokens_per_second=meter.tokens_per_second,
        epochs=[look for look in history.looks if look.is_epoch_end],
        best_epoch=history.looks[history.best].epoch,
        replay=history.benchmarks[history.best],
        num_skipped_samples=len(index.skipped),
        evaluations=history.looks,
        kept=history.kept(config.train.keep_best, WEIGHTS_FILE),
        early_stop=history.early_stop(config.train),
        num_empty_packs=history.num_empty_packs,
        num_skipped_steps=history.recent.num_skipped,
        num_spikes=history.recent.num_spikes,
        data_wait_share=meter.data_wait_share,
        mfu=meter.mfu,
        peak_memory_bytes=meter.peak_memory_bytes,
    )


def _complete(writer: ArtifactWriter, draft: Eagle3DraftModel, result: TrainResult, seconds: float) -> None:
    """Write the finished draft and mark the artifact complete, which also removes the resume files."""
    weights, config = writer.folder / WEIGHTS_FILE, writer.folder / CONFIG_FILE
    content = save(checkpoint_tensors(draft), metadata={"format": "pt"})
    make_room(writer.folder, len(content), weights.name)
    write_atomic(weights, content)
    write_atomic(config, json.dumps(draft.config.to_dict(), indent=1, default=str))
    others = [writer.folder / one.file for one in result.kept[1:]]
    writer.complete(
        [weights, config, writer.folder / METRICS_FILE, *others],
        seconds=seconds,
        result=result.model_dump(mode="json"),
    )
