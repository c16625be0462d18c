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
from eagle3_core.data.vocabulary import DraftVocabulary, load_vocabulary
from eagle3_core.errors import StoreError
from eagle3_core.identity import plan_vocabulary
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.store.samples import SampleSource, open_samples
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.training.loader import SampleIndex, index_samples
from eagle3_core.training.train import check_inputs

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
    store = open_store(config)
    capture = store.read(refs["capture"])
    samples = read_dataset(store.fetch(refs["dataset"]))
    vocabulary = load_vocabulary(store.fetch(refs["vocabulary"]))
    source = open_samples(config, store, capture)
    check_inputs(config, target, samples, vocabulary, source)
    index = index_samples(samples, source, _bad_samples(store, refs.get("verification")))
    return Inputs(config, target, vocabulary, source, index)


def _bad_samples(store: LocalStore, verification: ArtifactRef | None) -> dict[str, str]:
    if verification is None:
        return {}
    found = store.read(verification).facts["result"]["bad_samples"]
    return {bad["key"]: bad["problem"] for bad in found}
