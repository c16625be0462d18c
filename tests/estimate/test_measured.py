"""Planned bytes against what a finished tiny run has on its disk, afterwards and at the peak of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.artifacts import ArtifactKind
from eagle3_core.contracts import StepSpec
from eagle3_core.estimate.sizes import Size, artifact_sizes
from eagle3_core.estimate.workload import count_samples
from eagle3_core.identity import plan_export
from eagle3_core.serving import export
from eagle3_core.step import Progress
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.tree import folder_bytes
from eagle3_core.target.info import inspect_target
from eagle3_core.training import train
from eagle3_core.training.checkpoint import ResumeFolder
from tests.tiny import make_tiny_target
from tests.training.examples import make_config, make_samples, write_inputs

pytestmark = pytest.mark.engine
PEAKS: list[int] = []


def newest_first(lengths: Sequence[float], keep: int) -> list[int]:
    """As if every look at the held-out split were better than those before."""
    return list(reversed(range(len(lengths))))[:keep]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> StepSpec:
    """Capture, training, in which every epoch is the best so far, and export: hidden size 128."""
    root = tmp_path_factory.mktemp("run")
    folder = make_tiny_target(root / "target", num_layers=4, hidden_size=128)
    target = inspect_target(folder)
    config = make_config(str(folder), train={"num_epochs": 4, "pack_tokens": 256})
    config = config.model_copy(update={"target": config.target.model_copy(update={"dtype": "float32"})})
    spec = write_inputs(root / "store", config, target, make_samples(target, 60, 20))
    with pytest.MonkeyPatch.context() as patch:
        remove = ResumeFolder._remove_unnamed

        def measured(self: ResumeFolder, *keep: Any) -> None:
            PEAKS.append(folder_bytes(self._folder))
            remove(self, *keep)

        patch.setattr(ResumeFolder, "_remove_unnamed", measured)
        patch.setattr("eagle3_core.training.history.best_evaluations", newest_first)
        train.run(spec, Progress("train"))
    plan = plan_export(spec.config, target, spec.outputs["checkpoint"].ref)
    inputs = {"checkpoint": spec.outputs["checkpoint"].ref, "vocabulary": spec.inputs["vocabulary"]}
    export.run(
        spec.model_copy(update={"outputs": spec.outputs | {"export": plan}, "inputs": inputs}),
        Progress("export"),
    )
    return spec.model_copy(update={"outputs": spec.outputs | {"export": plan}})


def planned(spec: StepSpec) -> dict[ArtifactKind, Size]:
    target = inspect_target(Path(spec.target_path))
    samples = read_dataset(LocalStore(spec.config.store_path).folder(spec.inputs["dataset"]))
    return artifact_sizes(spec.config, target, count_samples(samples))


def on_disk(spec: StepSpec, kind: str) -> int:
    ref = spec.outputs[kind].ref if kind in spec.outputs else spec.inputs[kind]
    return folder_bytes(LocalStore(spec.config.store_path).folder(ref))


@pytest.mark.parametrize("kind", ["dataset", "vocabulary", "capture", "labels", "checkpoint", "export"])
def test_every_large_artifact_is_planned_closely(finished: StepSpec, kind: ArtifactKind) -> None:
    within = {"dataset": 0.6, "vocabulary": 0.6, "labels": 0.25}.get(kind, 0.05)
    assert on_disk(finished, kind) == pytest.approx(planned(finished)[kind].final, rel=within)


def test_the_whole_run_is_planned_within_ten_per_cent(finished: StepSpec) -> None:
    sizes = planned(finished)
    kinds: tuple[ArtifactKind, ...] = ("dataset", "vocabulary", "capture", "labels", "checkpoint", "export")
    total = sum(on_disk(finished, kind) for kind in kinds)
    assert total == pytest.approx(sum(sizes[kind].final for kind in kinds), rel=0.1)


def test_the_peak_of_training_is_planned_within_ten_per_cent_and_never_below(finished: StepSpec) -> None:
    peak = planned(finished)["checkpoint"].peak
    assert 0.9 * peak <= max(PEAKS) <= peak
