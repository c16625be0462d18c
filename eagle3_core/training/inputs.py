"""What a training reads: opened, and found to fit the configuration before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eagle3_core.artifacts import ArtifactRef, Manifest
from eagle3_core.config import RunConfig
from eagle3_core.data.vocabulary import DraftVocabulary, load_vocabulary
from eagle3_core.errors import TrainingError
from eagle3_core.identity import draft_vocab_size
from eagle3_core.store.dataset import Sample, read_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.samples import SampleSource, open_samples
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import final_layer_id, resolve_aux_layer_ids
from eagle3_core.training.loader import SampleIndex, index_samples


@dataclass(frozen=True)
class Inputs:
    """Inputs that fit.

    Attributes:
        target: of the capture.
        capture: its manifest.
        samples: the dataset.
        vocabulary: of the draft.
        source: reads the capture.
        index: the samples of both splits that can be trained on.
    """

    target: TargetInfo
    capture: Manifest
    samples: list[Sample]
    vocabulary: DraftVocabulary
    source: SampleSource
    index: SampleIndex


def read_inputs(
    config: RunConfig, target: TargetInfo, store: LocalStore, refs: Mapping[str, ArtifactRef]
) -> Inputs:
    """Open and check capture, dataset, vocabulary and, if there is one, verification.

    Raises:
        StoreError: one is missing or cannot be read.
        TrainingError: they do not fit the configuration, or a split is empty.
    """
    capture = store.read(refs["capture"])
    samples = read_dataset(store.fetch(refs["dataset"]))
    vocabulary = load_vocabulary(store.fetch(refs["vocabulary"]))
    source = open_samples(config, store, capture)
    check_inputs(config, target, samples, vocabulary, source)
    index = index_samples(samples, source, _bad_samples(store, refs.get("verification")))
    return Inputs(target, capture, samples, vocabulary, source, index)


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


def _bad_samples(store: LocalStore, verification: ArtifactRef | None) -> dict[str, str]:
    """Key and problem of samples that verification found bad."""
    if verification is None:
        return {}
    found = store.read(verification).facts["result"]["bad_samples"]
    return {bad["key"]: bad["problem"] for bad in found}
