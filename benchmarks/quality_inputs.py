"""What `train_quality` trains on: a capture with its dataset, draft vocabulary and target, opened to read.

It is that of a run in a workspace, or one that a profile fits; nothing is written to either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import RunConfig, load_profile, resolve_path
from eagle3_core.contracts import StepSpec
from eagle3_core.data.vocabulary import DraftVocabulary
from eagle3_core.errors import StoreError
from eagle3_core.identity import plan_vocabulary
from eagle3_core.store.labels import SampleLabels
from eagle3_core.store.open import open_store
from eagle3_core.store.samples import SamplePlace, SampleSource
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.weights import FinalHead
from eagle3_core.training.inputs import read_inputs
from eagle3_core.training.labels import LabelMaker
from eagle3_core.training.loader import SampleIndex, StoredSample, label_states

TRAIN_SPEC = "logs/train.spec.json"
"""In a run's folder: what its stage `train` was given."""


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of a training."""

    config: RunConfig
    target: TargetInfo
    vocabulary: DraftVocabulary
    source: SampleSource
    index: SampleIndex


class NewLabels:
    """Labels of some samples, made in memory.

    Args:
        inputs: what is compared on.
        samples: of its capture.
    """

    def __init__(self, inputs: Inputs, samples: Sequence[StoredSample]) -> None:
        maker = LabelMaker(FinalHead(inputs.target, inputs.config.engine.device), inputs.vocabulary)
        with inputs.source.ahead(one.place for one in samples) as captured:
            made = maker.labels(label_states(each) for each in captured)
        self._made = {one.key: each for one, each in zip(samples, made, strict=True)}

    def sample(self, place: SamplePlace, key: str) -> SampleLabels:
        """The labels of one of the samples."""
        return self._made[key]


def inputs_of_run(workspace: Path, run_id: str | None, overrides: Sequence[str]) -> Inputs:
    """What a run in a workspace trained on.

    Args:
        workspace: of the run; it may have been moved since.
        run_id: of the run; None is the newest that came as far as training.
        overrides: `section.field=value` over the run's configuration.

    Raises:
        StoreError: no such run.
        ConfigError, TrainingError: overrides that are wrong or do not fit the capture.
    """
    workspace = workspace.resolve()
    specs = sorted(workspace.glob(f"runs/{run_id or '*'}/{TRAIN_SPEC}"))
    if not specs:
        raise StoreError(
            f"{workspace}/runs has no run {run_id}" if run_id else f"{workspace}/runs has no run",
            expected=f"one with {TRAIN_SPEC}",
            remedy="run a profile up to the stage train",
        )
    spec = StepSpec.model_validate_json(specs[-1].read_text())
    profile = specs[-1].parent.parent / "config.yaml"
    config = load_profile(profile, [f"workspace={workspace}", *overrides])
    return open_inputs(config, inspect_target(Path(spec.target_path)), spec.inputs)


def inputs_of_capture(
    profile: str, store: str | None, capture_id: str, target: Path | None, overrides: Sequence[str]
) -> Inputs:
    """A capture in a store, trained on as a profile says.

    Args:
        profile: path or name.
        store: root of the store; None is the profile's.
        capture_id: 16 hex digits.
        target: the target's folder; None is the profile's `target.model` as a path.
        overrides: `section.field=value` over the profile.

    Raises:
        StoreError: the store lacks the capture, its dataset, or a vocabulary of the profile's size.
        ConfigError, TrainingError: a profile that is wrong or does not fit the capture.
    """
    config = load_profile(profile, [*([f"store={store}"] if store else []), *overrides])
    info = inspect_target(target or resolve_path(config.target.model))
    capture = open_store(config).read(ArtifactRef.parse(f"capture/{capture_id}"))
    dataset = capture.parents["dataset"]
    vocabulary = plan_vocabulary(config, info, dataset).ref
    return open_inputs(config, info, {"capture": capture.ref, "dataset": dataset, "vocabulary": vocabulary})


def open_inputs(config: RunConfig, target: TargetInfo, refs: dict[str, ArtifactRef]) -> Inputs:
    """Open and check capture, dataset, vocabulary and, if there is one, verification.

    Raises:
        StoreError: one is missing.
        TrainingError: they do not fit the configuration, or a split is empty.
    """
    found = read_inputs(config, target, open_store(config), refs)
    return Inputs(config, target, found.vocabulary, found.source, found.index)
