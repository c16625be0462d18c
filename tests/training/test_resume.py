"""A training that was killed and goes on is the one that never stopped; what does not belong is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.contracts import StepSpec, TrainResult
from eagle3_core.errors import StoreError, TrainingError
from eagle3_core.identity import plan_verification
from eagle3_core.notices import NOTICES
from eagle3_core.store.local import LocalStore
from eagle3_core.target.info import TargetInfo
from eagle3_core.training import train
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.steps import plan_steps
from tests.training.examples import make_samples
from tests.training.runs import (
    SAVE_ALWAYS,
    Quiet,
    folder_of,
    records_of,
    run_killed,
    run_killed_with_ranks,
    spec_of,
)

pytestmark = pytest.mark.engine
NUM_STEPS = 20
SETTINGS = {"pack_tokens": 48, "num_epochs": 2, "checkpoint_every_seconds": SAVE_ALWAYS}


def twenty_steps(root: Path, target: TargetInfo, **changes: Any) -> StepSpec:
    """Ten packs an epoch, two epochs."""
    root.mkdir(parents=True, exist_ok=True)
    return spec_of(root, target, make_samples(target, 20, 3), train=SETTINGS | changes)


@pytest.fixture(scope="module")
def straight(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetInfo
) -> tuple[StepSpec, TrainResult]:
    spec = twenty_steps(tmp_path_factory.mktemp("straight"), tiny_target)
    return spec, train.run(spec, Quiet())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def killed_at_seven(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetInfo) -> StepSpec:
    root = tmp_path_factory.mktemp("killed")
    spec = twenty_steps(root, tiny_target)
    run_killed(spec, 7, root)
    return spec


def copied(spec: StepSpec, root: Path) -> StepSpec:
    """The same run, its store copied below `root`."""
    shutil.copytree(spec.config.store_path, root / "store")
    return spec.model_copy(update={"config": spec.config.model_copy(update={"store": str(root / "store")})})


def expect_equal(spec: StepSpec, other: StepSpec) -> None:
    """The same steps in the same order with the same losses, and the same weights."""
    ours, theirs = records_of(spec, "step"), records_of(other, "step")
    assert [record["step"] for record in ours] == list(range(1, NUM_STEPS + 1))
    assert [record["samples"] for record in ours] == [record["samples"] for record in theirs]
    assert [record["learning_rate"] for record in ours] == [record["learning_rate"] for record in theirs]
    for record, wanted in zip(ours, theirs, strict=True):
        assert record["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    a, b = (load_file(folder_of(each) / "model.safetensors") for each in (spec, other))
    assert all(torch.allclose(a[name].float(), b[name].float(), atol=1e-6) for name in b)


def test_killed_at_7_and_in_the_second_epoch_and_resumed_equals_20_steps_straight(
    straight: tuple[StepSpec, TrainResult],
    killed_at_seven: StepSpec,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = copied(killed_at_seven, tmp_path)
    run_killed(spec, 16, tmp_path, saved=10)
    quiet = Quiet()
    caplog.set_level("INFO", logger=NOTICES)
    result = train.run(spec, quiet)  # type: ignore[arg-type]
    assert result.resumed_from_step is not None
    assert 10 <= result.resumed_from_step < 16
    assert f"resumed at step {result.resumed_from_step} of {NUM_STEPS}" in caplog.messages
    assert quiet.steps == list(range(result.resumed_from_step + 1, NUM_STEPS + 1))
    assert result.num_steps == NUM_STEPS
    expect_equal(spec, straight[0])
    looks = [look.model_dump(exclude={"seconds"}) for look in result.evaluations]
    wanted = [look.model_dump(exclude={"seconds"}) for look in straight[1].evaluations]
    assert looks == wanted
    assert result.kept == straight[1].kept


def with_ranks(spec: StepSpec, num_ranks: int, mode: str) -> StepSpec:
    """The same training on another number of ranks."""
    train_section = spec.config.train.model_copy(update={"num_ranks": num_ranks, "parallel": mode})
    return spec.model_copy(update={"config": spec.config.model_copy(update={"train": train_section})})


@pytest.fixture(scope="module")
def two_ranks_killed_at_seven(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetInfo) -> StepSpec:
    root = tmp_path_factory.mktemp("two-killed")
    spec = with_ranks(twenty_steps(root, tiny_target, packs_per_step=2, num_epochs=4), 2, "ddp")
    run_killed_with_ranks(spec, 7, root)
    return spec


@pytest.fixture(scope="module")
def straight_in_pairs(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetInfo) -> StepSpec:
    root = tmp_path_factory.mktemp("pairs")
    spec = twenty_steps(root, tiny_target, packs_per_step=2, num_epochs=4)
    train.run(spec, Quiet())  # type: ignore[arg-type]
    return spec


@pytest.mark.parametrize(("num_ranks", "mode"), [(2, "fsdp2"), (1, "auto")])
def test_two_ranks_killed_at_7_and_resumed_with_shards_or_on_one_equal_20_steps_straight(
    num_ranks: int,
    mode: str,
    straight_in_pairs: StepSpec,
    two_ranks_killed_at_seven: StepSpec,
    tmp_path: Path,
) -> None:
    spec = with_ranks(copied(two_ranks_killed_at_seven, tmp_path), num_ranks, mode)
    result = train.run(spec, Quiet())  # type: ignore[arg-type]
    assert result.resumed_from_step is not None
    assert 1 <= result.resumed_from_step <= 7
    assert result.num_steps == NUM_STEPS
    expect_equal(spec, straight_in_pairs)


@pytest.mark.parametrize("part", ["num_steps", "position", "optimizer", "random", "history"])
def test_a_checkpoint_without_a_part_is_refused_and_no_warm_up_begins_again(
    killed_at_seven: StepSpec, tmp_path: Path, part: str
) -> None:
    """The learning rate follows from step and number of steps: without either there is no schedule."""
    spec = copied(killed_at_seven, tmp_path)
    plan = spec.outputs["checkpoint"]
    state = ResumeFolder(folder_of(spec), plan).load()
    assert state is not None
    step = state["position"]["step"]
    del state[part]
    ResumeFolder(folder_of(spec), plan).save(state, step)
    quiet = Quiet()
    with pytest.raises(TrainingError, match=rf"\.pt lacks {part}; expected all of .*; remove"):
        train.run(spec, quiet)  # type: ignore[arg-type]
    assert quiet.steps == []


def test_a_checkpoint_whose_files_are_gone_is_refused(killed_at_seven: StepSpec, tmp_path: Path) -> None:
    spec = copied(killed_at_seven, tmp_path)
    for path in folder_of(spec).glob("resume-*.pt"):
        path.unlink()
    with pytest.raises(StoreError, match=r"no checkpoint can be resumed: .*resume-\d{8}\.pt is missing"):
        train.run(spec, Quiet())  # type: ignore[arg-type]


def test_a_tied_target_with_a_draft_vocabulary_of_64_is_resumed_and_stays_untied(
    killed_at_seven: StepSpec, tmp_path: Path, tiny_target: TargetInfo
) -> None:
    spec = copied(killed_at_seven, tmp_path)
    result = train.run(spec, Quiet())  # type: ignore[arg-type]
    assert tiny_target.tied_embeddings
    assert result.resumed_from_step is not None
    config = json.loads((folder_of(spec) / "config.json").read_text())
    assert config["draft_vocab_size"] == 64
    assert config["tie_word_embeddings"] is False
    assert config["transformer_layer_config"]["tie_word_embeddings"] is False
    tensors = load_file(folder_of(spec) / "model.safetensors")
    assert tuple(tensors["lm_head.weight"].shape) == (64, 64)


def test_a_resume_with_another_draft_vocabulary_is_refused_with_both_sizes(
    killed_at_seven: StepSpec, tmp_path: Path, tiny_target: TargetInfo
) -> None:
    samples = make_samples(tiny_target, 20, 3)
    other = spec_of(tmp_path, tiny_target, samples, train=SETTINGS, draft={"vocab_size": 32})
    assert folder_of(other).name != folder_of(killed_at_seven).name
    shutil.copytree(folder_of(killed_at_seven), folder_of(other))
    with pytest.raises(TrainingError, match=r"draft\.vocab_size: 32 != 64"):
        train.run(other, Quiet())  # type: ignore[arg-type]


def test_a_resume_on_other_samples_says_that_its_epoch_is_not_the_one_that_began(
    killed_at_seven: StepSpec, tmp_path: Path, tiny_target: TargetInfo, caplog: pytest.LogCaptureFixture
) -> None:
    """Verification has left out one more, and the number of steps is the same."""
    spec = copied(killed_at_seven, tmp_path)
    lengths = [len(sample) for sample in make_samples(tiny_target, 20, 3)[:20]]

    def num_steps(without: int) -> int:
        left = lengths[:without] + lengths[without + 1 :]
        return sum(len(plan_steps(left, spec.config.train, epoch)) for epoch in (0, 1))

    number = next(number for number in range(20) if num_steps(number) == NUM_STEPS)
    plan = plan_verification(spec.config, spec.inputs["capture"])
    with LocalStore(spec.config.store_path).writer(plan) as writer:
        writer.complete(result={"bad_samples": [{"key": f"sample-{number}", "problem": "NaN"}]})
    other = spec.model_copy(update={"inputs": spec.inputs | {"verification": plan.ref}})
    result = train.run(other, Quiet())  # type: ignore[arg-type]
    assert result.resumed_from_step is not None
    assert caplog.text.count("the training samples are not those of the checkpoint") == 1
