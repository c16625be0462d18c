"""What training does with bad steps, looks within epochs, early stopping and the weights that it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.contracts import StepSpec, TrainResult
from eagle3_core.errors import TrainingError
from eagle3_core.notices import NOTICES
from eagle3_core.sections import TrainConfig
from eagle3_core.store.local import LocalStore
from eagle3_core.store.samples import SampleSource
from eagle3_core.target.info import TargetInfo
from eagle3_core.training import train
from eagle3_core.training.health import RecentSteps, Verdict, judge_step
from eagle3_core.training.history import History
from tests.training.runs import Quiet, folder_of, records_of, spec_of

pytestmark = pytest.mark.engine


def run(spec: StepSpec) -> TrainResult:
    return train.run(spec, Quiet())  # type: ignore[arg-type]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Multiply the states of a sample, by NaN for instance."""
    factors: dict[str, float] = {}
    read = SampleSource.sample

    def spoiled(self: Any, place: Any) -> Any:
        sample = read(self, place)
        if sample.key in factors:
            sample.aux_states[-3] *= factors[sample.key]
        return sample

    monkeypatch.setattr(SampleSource, "sample", spoiled)
    return factors.__setitem__


def lengths_of_looks(monkeypatch: pytest.MonkeyPatch, *lengths: float) -> None:
    """Let the looks at the held-out split find these acceptance lengths, one after the other."""
    left, add = list(lengths), History.add

    def given(self: History, look: Any, *rest: Any) -> str | None:
        heldout = look.heldout.model_copy(update={"acceptance_length": left.pop(0)})
        return add(self, look.model_copy(update={"heldout": heldout}), *rest)

    monkeypatch.setattr(History, "add", given)


def test_a_step_that_is_not_finite_is_left_out_by_policy_counted_and_named(
    tmp_path: Path, tiny_target: TargetInfo, spoil: Any
) -> None:
    spec = spec_of(tmp_path, tiny_target, train={"on_nonfinite": "skip", "num_epochs": 2})
    spoil("sample-5", torch.nan)
    result = run(spec)
    left_out = records_of(spec, "skipped")
    assert result.num_skipped_steps == len(left_out) == 2
    assert all("sample-5" in record["samples"] and record["loss"] is None for record in left_out)
    assert all("it is not finite" in record["reason"] for record in left_out)
    assert result.num_steps == len(records_of(spec, "step")) + 2
    weights = load_file(folder_of(spec) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_more_steps_left_out_than_allowed_end_training(
    tmp_path: Path, tiny_target: TargetInfo, spoil: Any
) -> None:
    settings = {"on_nonfinite": "skip", "max_skipped_steps": 1, "num_epochs": 2}
    spec = spec_of(tmp_path, tiny_target, train=settings)
    spoil("sample-5", torch.nan)
    with pytest.raises(TrainingError, match=r"max_skipped_steps allows 1 steps left out.*sample-5"):
        run(spec)


def test_a_held_out_loss_that_is_not_finite_ends_training_with_its_samples(
    tmp_path: Path, tiny_target: TargetInfo, spoil: Any
) -> None:
    """JSON has no number for it, and no evaluation could be compared with it."""
    spec = spec_of(tmp_path, tiny_target, train={"num_epochs": 1})
    spoil("sample-13", torch.nan)
    with pytest.raises(TrainingError, match=r"held-out loss is not finite in packs of .*sample-13"):
        run(spec)
    assert not (folder_of(spec) / "manifest.json").exists()


@pytest.mark.parametrize("policy", ["warn", "skip", "stop"])
def test_a_spike_is_treated_by_policy_and_named(
    tmp_path: Path,
    tiny_target: TargetInfo,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Step 21 is given a hundred times its loss."""

    def judge(loss: float, norm: float, recent: RecentSteps, config: TrainConfig) -> Verdict:
        factor = 100 if len(recent.losses) == 20 and not recent.num_spikes else 1
        return judge_step(factor * loss, norm, recent, config)

    monkeypatch.setattr("eagle3_core.training.loop.judge_step", judge)
    spec = spec_of(tmp_path, tiny_target, train={"on_spike": policy, "pack_tokens": 32, "num_epochs": 3})
    if policy == "stop":
        with pytest.raises(TrainingError, match=r"step 21 .* a spike beside the last 20 steps; .*sample-\d"):
            run(spec)
        return
    result = run(spec)
    assert result.num_spikes == 1
    assert "a spike beside the last 20 steps; its samples are sample-" in caplog.text
    left_out = [record["step"] for record in records_of(spec, "skipped")]
    assert left_out == ([21] if policy == "skip" else [])
    assert result.num_skipped_steps == len(left_out)
    assert result.num_steps == len(records_of(spec, "step")) + len(left_out)


def test_training_looks_within_epochs_and_keeps_the_best_weights(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths_of_looks(monkeypatch, 1.1, 1.4, 1.2, 1.3, 1.0, 1.0)
    settings = {"evaluate_every_steps": 2, "keep_best": 3, "num_epochs": 2}
    spec = spec_of(tmp_path, tiny_target, train=settings)
    result = run(spec)
    looks = [(look.step, look.is_epoch_end) for look in result.evaluations]
    per_epoch = result.num_steps // 2
    wanted = [step for step in range(1, result.num_steps + 1) if step % 2 == 0 or step % per_epoch == 0]
    assert looks == [(step, step % per_epoch == 0) for step in wanted]
    assert [look.step for look in result.epochs] == [per_epoch, 2 * per_epoch]
    assert [one.acceptance_length for one in result.kept] == [1.4, 1.3, 1.2]
    assert [one.step for one in result.kept] == [wanted[1], wanted[3], wanted[2]]
    names = {"model.safetensors", *(f"best-{wanted[i]:08d}.safetensors" for i in (2, 3))}
    assert {one.file for one in result.kept} == names
    files = {path.name for path in folder_of(spec).iterdir() if path.name != ".lock"}
    assert files == names | {"manifest.json", "metrics.jsonl", "config.json"}
    manifest = LocalStore(spec.config.store_path).read(spec.outputs["checkpoint"].ref)
    assert names <= {entry.path for entry in manifest.files}
    best, other = (load_file(folder_of(spec) / one.file) for one in result.kept[:2])
    assert set(other) <= set(best)
    assert not torch.equal(best["fc.weight"], other["fc.weight"])
    assert [record["step"] for record in records_of(spec, "evaluation")] == wanted


def test_training_stops_when_acceptance_stands_still_and_serves_the_best(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lengths_of_looks(monkeypatch, 1.2, 1.3, 1.31, 1.32, 1.5)
    settings = {"num_epochs": 5, "early_stop_evaluations": 2, "early_stop_min_gain": 0.05}
    spec = spec_of(tmp_path, tiny_target, train=settings)
    caplog.set_level("INFO", logger=NOTICES)
    result = run(spec)
    assert [record.message for record in caplog.records if record.name == NOTICES] == [result.early_stop]
    assert result.num_planned_steps == result.num_steps * 5 // 4
    assert len(result.epochs) == 4
    assert result.best_epoch == 3
    assert result.early_stop.startswith(f"stopped early at step {result.num_steps}: 2 evaluations")
    manifest = LocalStore(spec.config.store_path).read(spec.outputs["checkpoint"].ref)
    assert TrainResult.model_validate(manifest.facts["result"]).early_stop == result.early_stop


def test_a_training_that_stands_still_at_its_very_end_has_not_stopped_early(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths_of_looks(monkeypatch, 1.2, 1.1)
    result = run(spec_of(tmp_path, tiny_target, train={"num_epochs": 2, "early_stop_evaluations": 1}))
    assert (len(result.epochs), result.early_stop) == (2, "")
    assert result.num_steps == result.num_planned_steps


def test_metrics_have_speed_waiting_memory_and_acceptance_and_progress_shows_them(
    tmp_path: Path, tiny_target: TargetInfo
) -> None:
    spec, quiet = spec_of(tmp_path, tiny_target), Quiet()
    result = train.run(spec, quiet)  # type: ignore[arg-type]
    steps = records_of(spec, "step")
    for record in steps:
        assert record["seconds"] >= record["data_wait_seconds"] >= 0
        assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"], rel=0.01)
        assert record["mfu"] is None
        assert record["peak_memory_gb"] > 0.01
    first, *later = steps
    spent = sum(record["seconds"] for record in later)
    assert result.tokens_per_second == pytest.approx(sum(r["tokens"] for r in later) / spent, rel=0.01)
    assert result.warm_up_seconds == pytest.approx(first["seconds"], rel=0.01)
    assert result.data_wait_share is not None
    assert 0 <= result.data_wait_share < 1
    look = records_of(spec, "evaluation")[-1]
    assert len(look["heldout_loss_by_step"]) == len(look["rates"]["unconditional"]) == 3
    assert look["heldout"]["acceptance_length"] >= 1
    assert {"loss", "acceptance_length", "tokens_per_second", "data_wait_share", "peak_memory_gb"} <= set(
        quiet.figures
    )


def test_a_run_with_a_folder_gets_tensorboard_files_and_another_run_that_resumes_the_same_points(
    tmp_path: Path, tiny_target: TargetInfo
) -> None:
    from tests.training.test_tensorboard import read

    spec = spec_of(tmp_path / "store", tiny_target, workspace=str(tmp_path / "workspace"))
    run_folder = tmp_path / "workspace" / "runs" / spec.run_id
    run_folder.mkdir(parents=True)
    run(spec)
    points = read(run_folder / "tensorboard")
    assert [step for step, _, _ in points["step/loss"]] == [r["step"] for r in records_of(spec, "step")]
    assert len(points["heldout/acceptance_length"]) == 2
    assert json.loads((folder_of(spec) / "manifest.json").read_text())["state"] == "complete"
