"""The step `train` on a tiny random target: files, resume, refusals."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.config import RunConfig
from eagle3_core.contracts import StepSpec, TrainResult
from eagle3_core.data.vocabulary import load_vocabulary
from eagle3_core.errors import FolderInUseError, TrainingError
from eagle3_core.identity import STEP_VERSION
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.samples import SampleSource
from eagle3_core.target.info import TargetInfo
from eagle3_core.training import train
from eagle3_core.training.draft import build_draft
from tests.tiny import make_tiny_target
from tests.training.examples import make_samples
from tests.training.runs import SAVE_ALWAYS, Quiet, folder_of, records_of, spec_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetInfo
) -> tuple[StepSpec, TrainResult]:
    spec = spec_of(tmp_path_factory.mktemp("straight"), tiny_target)
    return spec, train.run(spec, Quiet())  # type: ignore[arg-type]


def test_a_finished_checkpoint_holds_the_draft_and_nothing_of_a_resume(
    trained: tuple[StepSpec, TrainResult], tiny_target: TargetInfo
) -> None:
    spec, result = trained
    files = {path.name for path in folder_of(spec).iterdir()}
    assert files == {"manifest.json", "metrics.jsonl", "model.safetensors", "config.json"}
    manifest = LocalStore(spec.config.store_path).read(spec.outputs["checkpoint"].ref)
    assert TrainResult.model_validate(manifest.facts["result"]) == result
    assert result.num_steps == len(records_of(spec, "step"))
    assert len(result.epochs) == len(records_of(spec, "evaluation")) == 2
    assert result.replay.num_samples == 2
    assert result.epochs[0].heldout.num_samples == 4


def test_training_on_fixed_states_changes_only_with_its_step_version(
    trained: tuple[StepSpec, TrainResult],
) -> None:
    """Golden output: when this fails and the change is meant, raise `STEP_VERSION["checkpoint"]` too."""
    losses = [epoch.train_loss for epoch in trained[1].epochs] + [trained[1].epochs[-1].heldout_loss]
    assert STEP_VERSION["checkpoint"] == 3
    assert losses == pytest.approx([1.22491, 1.17667, 1.26388], rel=1e-3)


def test_tensors_have_speculators_names_and_the_targets_own_are_left_out(
    trained: tuple[StepSpec, TrainResult], tiny_target: TargetInfo
) -> None:
    spec, _ = trained
    tensors = load_file(folder_of(spec) / "model.safetensors")
    vocabulary = load_vocabulary(LocalStore(spec.config.store_path).folder(spec.inputs["vocabulary"]))
    draft = build_draft(spec.config, tiny_target, vocabulary)
    target_own = {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"}
    assert set(tensors) == set(draft.state_dict()) - target_own
    assert torch.equal(tensors["d2t"], torch.from_numpy(vocabulary.d2t))
    assert torch.equal(tensors["t2d"], torch.from_numpy(vocabulary.t2d))
    assert torch.equal(tensors["lm_head.weight"], draft.lm_head.weight)
    assert not torch.equal(tensors["fc.weight"], draft.fc.weight)
    assert {t.dtype for name, t in tensors.items() if name not in ("d2t", "t2d")} == {torch.float32}
    config = json.loads((folder_of(spec) / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[flag] for flag in flags] == [False] * 4
    layer = config["transformer_layer_config"]
    assert (layer["hidden_size"], layer["num_key_value_heads"], layer["head_dim"]) == (64, 2, 16)


def test_a_tied_target_gives_an_untied_draft(
    trained: tuple[StepSpec, TrainResult], tiny_target: TargetInfo
) -> None:
    assert tiny_target.tied_embeddings
    config = json.loads((folder_of(trained[0]) / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["transformer_layer_config"]["tie_word_embeddings"] is False


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_loss_falls_with_one_two_and_three_layers(
    layers: int, compute: str, tmp_path: Path, tiny_target: TargetInfo
) -> None:
    samples = make_samples(tiny_target, num_train=2, num_heldout=1)
    spec = spec_of(
        tmp_path,
        tiny_target,
        samples,
        draft={"num_layers": layers},
        train={"num_epochs": 10, "compute_dtype": compute, "learning_rate": 3e-3, "schedule": "constant"},
    )
    train.run(spec, Quiet())  # type: ignore[arg-type]
    losses = [record["loss"] for record in records_of(spec, "step")]
    assert len(losses) == 10
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


def test_a_pack_without_loss_is_skipped_and_counted(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(tiny_target)
    silent = [s.key for s in samples[:4]]
    for sample in samples[:4]:
        sample.loss_mask[:] = 0
    spec = spec_of(tmp_path, tiny_target, samples, train={"pack_tokens": 32, "num_epochs": 1})
    monkeypatch.setattr("eagle3_core.training.loader._without_loss", lambda sample: None)
    result = train.run(spec, Quiet())  # type: ignore[arg-type]
    steps, left_out = records_of(spec, "step"), records_of(spec, "skipped")
    assert result.num_empty_packs == len(left_out) == result.num_steps - len(steps) > 0
    assert {record["reason"] for record in left_out} == {"no row of it carries loss"}
    assert all(set(record["samples"]) <= set(silent) for record in left_out)
    assert all(np.isfinite(record["loss"]) for record in steps)
    assert not any(set(record["samples"]) <= set(silent) for record in steps)


def test_a_loss_that_is_not_finite_stops_and_names_the_samples(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path, tiny_target)
    read = SampleSource.sample

    def spoiled(self: Any, place: Any) -> Any:
        sample = read(self, place)
        if sample.key == "sample-5":
            sample.aux_states[-3] = torch.nan
        return sample

    monkeypatch.setattr(SampleSource, "sample", spoiled)
    with pytest.raises(TrainingError, match=r"loss nan.*sample-5"):
        train.run(spec, Quiet())  # type: ignore[arg-type]


def test_samples_that_verification_found_bad_are_left_out(tmp_path: Path, tiny_target: TargetInfo) -> None:
    from eagle3_core.identity import plan_verification

    spec = spec_of(tmp_path, tiny_target, train={"num_epochs": 1})
    plan = plan_verification(spec.config, spec.inputs["capture"])
    with LocalStore(spec.config.store_path).writer(plan) as writer:
        bad = [{"key": "sample-3", "shard": "shard-00000.safetensors", "problem": "NaN"}]
        writer.complete(result={"bad_samples": bad})
    spec = spec.model_copy(update={"inputs": spec.inputs | {"verification": plan.ref}})
    result = train.run(spec, Quiet())  # type: ignore[arg-type]
    assert result.num_skipped_samples == 1
    assert all("sample-3" not in record["samples"] for record in records_of(spec, "step"))


def _with(spec: StepSpec, **update: Any) -> StepSpec:
    document = spec.config.model_dump(mode="json")
    for section, values in update.items():
        document[section] |= values
    return spec.model_copy(update={"config": RunConfig.model_validate(document)})


def test_a_capture_of_other_layers_is_refused_with_both(
    trained: tuple[StepSpec, TrainResult], tiny_target: TargetInfo
) -> None:
    spec = _with(trained[0], target={"aux_layer_ids": [0, 1, 2]})
    with pytest.raises(TrainingError, match=r"\(1, 2, 3\); expected \(0, 1, 2\)"):
        train.run(spec, Quiet())  # type: ignore[arg-type]


def test_a_vocabulary_of_another_size_is_refused_with_both(trained: tuple[StepSpec, TrainResult]) -> None:
    spec = _with(trained[0], draft={"vocab_size": 32})
    with pytest.raises(TrainingError, match=r"\(64, 300\); expected \(32, 300\)"):
        train.run(spec, Quiet())  # type: ignore[arg-type]


def test_a_capture_of_another_hidden_size_is_refused_with_both_before_anything_is_written(
    tmp_path: Path, tiny_target: TargetInfo
) -> None:
    spec = spec_of(tmp_path / "store", tiny_target)
    wide = make_tiny_target(tmp_path / "wide", num_layers=tiny_target.num_layers, hidden_size=128)
    spec = spec.model_copy(update={"target_path": str(wide)})
    with pytest.raises(TrainingError, match=r"the hidden size of .*shard-00000.*: 64; expected 128 by the"):
        train.run(spec, Quiet())  # type: ignore[arg-type]
    assert not folder_of(spec).exists()


@pytest.mark.parametrize(("num_train", "num_heldout", "empty"), [(0, 4, "train"), (4, 0, "heldout")])
def test_an_empty_split_is_refused_before_anything_is_written(
    num_train: int, num_heldout: int, empty: str, tmp_path: Path, tiny_target: TargetInfo
) -> None:
    spec = spec_of(tmp_path, tiny_target, make_samples(tiny_target, num_train, num_heldout))
    with pytest.raises(TrainingError, match=rf"the {empty} split has no sample .* split has 4"):
        train.run(spec, Quiet())  # type: ignore[arg-type]
    assert not folder_of(spec).exists()


def test_replay_may_draft_deeper_than_training(tmp_path: Path, tiny_target: TargetInfo) -> None:
    spec = spec_of(
        tmp_path,
        tiny_target,
        train={"ttt_steps": 1, "num_epochs": 1},
        benchmark={"num_speculative_tokens": 4},
    )
    result = train.run(spec, Quiet())  # type: ignore[arg-type]
    assert len(result.replay.per_position) == 4
    rates = records_of(spec, "evaluation")[0]["rates"]
    assert len(rates["unconditional"]) == 4
    assert len(read_dataset(LocalStore(spec.config.store_path).folder(spec.inputs["dataset"]))) == 16


def test_a_checkpoint_that_another_run_has_completed_is_left_alone(
    trained: tuple[StepSpec, TrainResult],
) -> None:
    spec, result = trained
    store = LocalStore(spec.config.store_path)
    folder = store.folder(spec.outputs["checkpoint"].ref)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}
    assert train.run(spec, Quiet()) == result  # type: ignore[arg-type]
    after = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}
    assert after == before


def test_a_new_draft_is_scaled_on_few_samples_and_few_tokens() -> None:
    def chosen(*lengths: int) -> list[int]:
        return train._first_samples(
            SimpleNamespace(samples=[SimpleNamespace(num_tokens=n) for n in lengths])  # type: ignore[arg-type]
        )

    assert chosen(*[10] * 40) == list(range(16))
    assert chosen(5000, 3000, 300, 10) == [0, 1]
    assert chosen(30_000, 10) == [0]


def test_every_step_says_how_often_the_draft_agrees_with_the_targets_own_choice(
    trained: tuple[StepSpec, TrainResult],
) -> None:
    for record in records_of(trained[0], "step"):
        rates, chained = record["unconditional"], record["conditional"]
        assert len(rates) == len(chained) == trained[0].config.train.ttt_steps
        assert rates[0] == chained[0]
        assert all(0 <= rate <= 1 for rate in rates)
        gained = np.cumprod([rate or 0.0 for rate in chained]).sum()
        assert record["acceptance_length"] == pytest.approx(1 + gained, abs=1e-3)
        assert 0 < record["draft_vocabulary_share"] < 1


def test_a_training_whose_folder_was_taken_over_ends_and_writes_nothing_over_it(
    tmp_path: Path, tiny_target: TargetInfo
) -> None:
    """A virtual machine that was suspended while another host went on."""
    spec = spec_of(tmp_path, tiny_target, train={"checkpoint_every_seconds": SAVE_ALWAYS})
    found: dict[str, bytes] = {}

    def progress(done: float, total: float | None, unit: str, *some: Any, **more: Any) -> None:
        pointer = folder_of(spec) / "resume.json"
        if unit == "steps" and pointer.is_file() and not found:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":  # it may have asked just now whether the folder is its own
                    thread.join()
            lock = folder_of(spec) / ".lock"
            owner = json.loads(lock.read_text()) | {"token": "another process"}
            lock.write_text(json.dumps(owner))
            found[pointer.name] = pointer.read_bytes()

    with pytest.raises(FolderInUseError, match=r"was taken over by another process .* while this one stood"):
        train.run(spec, progress)  # type: ignore[arg-type]
    assert (folder_of(spec) / "resume.json").read_bytes() == found["resume.json"]
