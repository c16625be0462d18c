"""Two ranks train as one does: the same steps, losses and weights, whole or sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.contracts import StepSpec, TrainResult
from eagle3_core.errors import TrainingError
from eagle3_core.identity import plan_verification
from eagle3_core.store.local import LocalStore
from eagle3_core.target.info import TargetInfo
from eagle3_core.training import train
from eagle3_core.training.ranks import Ranks
from eagle3_core.training.weights import choose_mode
from tests.training.examples import make_config, make_samples
from tests.training.runs import Quiet, folder_of, records_of, spec_of

pytestmark = pytest.mark.engine
AGREEMENT = ("unconditional", "conditional", "acceptance_length")


def quarantined(root: Path, target: TargetInfo, num_ranks: int, mode: str = "ddp") -> StepSpec:
    """Seven samples of which two are bad: the last step of two packs has one, and a rank none."""
    settings = {
        "pack_tokens": 32,
        "packs_per_step": 2,
        "num_epochs": 3,
        "num_ranks": num_ranks,
        "parallel": mode,
    }
    spec = spec_of(root, target, make_samples(target, 7, 4), train=settings, draft={"train_lm_head": True})
    plan = plan_verification(spec.config, spec.inputs["capture"])
    with LocalStore(spec.config.store_path).writer(plan) as writer:
        bad = [{"key": f"sample-{number}", "shard": "", "problem": "NaN"} for number in (1, 4)]
        writer.complete(result={"bad_samples": bad})
    return spec.model_copy(update={"inputs": spec.inputs | {"verification": plan.ref}})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetInfo) -> tuple[StepSpec, TrainResult]:
    spec = quarantined(tmp_path_factory.mktemp("alone"), tiny_target, 1)
    return spec, train.run(spec, Quiet())  # type: ignore[arg-type]


def expect_agreement(
    ours: tuple[StepSpec, TrainResult], theirs: tuple[StepSpec, TrainResult], tolerance: float = 1e-4
) -> None:
    """The same steps with the same losses, gradients, evaluations and weights."""
    (spec, result), (other_spec, other_result) = ours, theirs
    for record, other in zip(records_of(spec, "step"), records_of(other_spec, "step"), strict=True):
        for name in ("step", "samples", "tokens", "loss_rows", "learning_rate", *AGREEMENT):
            assert record[name] == other[name]
        for name in ("loss", "loss_by_step", "grad_norm"):
            assert record[name] == pytest.approx(other[name], rel=tolerance)
        share = "draft_vocabulary_share"
        assert record[share] == pytest.approx(other[share], abs=2e-4)  # it has four digits
    for record, other in zip(
        records_of(spec, "evaluation"), records_of(other_spec, "evaluation"), strict=True
    ):
        assert record["rates"] == other["rates"]
    for look, other_look in zip(result.evaluations, other_result.evaluations, strict=True):
        assert look.heldout_loss == pytest.approx(other_look.heldout_loss, rel=tolerance)
        assert look.heldout == other_look.heldout
    a, b = (load_file(folder_of(each) / "model.safetensors") for each in (spec, other_spec))
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[name].float(), b[name].float(), atol=tolerance) for name in b)
    files = [{path.name for path in folder_of(each).iterdir()} for each in (spec, other_spec)]
    assert files[0] == files[1]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_agree_with_one_also_where_one_of_them_has_no_pack(
    alone: tuple[StepSpec, TrainResult], tmp_path: Path, tiny_target: TargetInfo, mode: str
) -> None:
    spec = quarantined(tmp_path, tiny_target, 2, mode)
    assert spec.outputs["checkpoint"].ref == alone[0].outputs["checkpoint"].ref
    quiet = Quiet()
    result = train.run(spec, quiet)  # type: ignore[arg-type]
    assert result.num_steps == alone[1].num_steps == 6  # three packs an epoch: two and one
    assert quiet.steps[-1] == result.num_steps
    assert result.num_skipped_samples == 2
    expect_agreement((spec, result), alone)


def test_packs_one_after_the_other_are_one_large_pack(tmp_path: Path, tiny_target: TargetInfo) -> None:
    """A step divides by the loss rows of all its packs, not pack by pack."""
    losses, norms = [], []
    for name, settings in (
        ("one", {"pack_tokens": 4096, "packs_per_step": 1}),
        ("many", {"pack_tokens": 32, "packs_per_step": 64}),
    ):
        spec = spec_of(tmp_path / name, tiny_target, train={"num_epochs": 3} | settings)
        train.run(spec, Quiet())  # type: ignore[arg-type]
        losses += [[record["loss"] for record in records_of(spec, "step")]]
        norms += [[record["grad_norm"] for record in records_of(spec, "step")]]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


class Disagreeing(Ranks):
    """One rank that hears of another which has read a later checkpoint."""

    def all(self, value: Any) -> list[Any]:
        return [value, 7]


def test_ranks_that_have_read_different_checkpoints_do_not_train(
    tmp_path: Path, tiny_target: TargetInfo
) -> None:
    spec, quiet = spec_of(tmp_path, tiny_target), Quiet()
    with pytest.raises(TrainingError, match=r"the ranks have read checkpoints of the steps 0, 7; expected"):
        train.train_rank(spec, quiet, Disagreeing())  # type: ignore[arg-type]
    assert quiet.steps == []


def test_a_rank_says_that_it_is_here_when_its_gpu_has_sent_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(str(device)))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: seen.append(str(tensor.device)))
    Ranks(1, 2, torch.device("cuda", 0)).wait()
    assert seen == ["cuda:0", "cpu"]


def test_weights_are_sharded_where_they_would_fill_a_gpu() -> None:
    train_config = make_config().train
    assert choose_mode(train_config, 400_000_000, 141 << 30) == "ddp"
    assert choose_mode(train_config, 4_000_000_000, 80 << 30) == "fsdp2"
    assert choose_mode(train_config, 4_000_000_000, None) == "ddp"
    muon = train_config.model_copy(update={"optimizer": "muon"})
    assert choose_mode(muon, 4_000_000_000, 80 << 30) == "ddp"
