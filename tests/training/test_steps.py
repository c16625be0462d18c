"""Steps: planned alike by all ranks, read by the one whose packs they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.sections import TrainConfig
from eagle3_core.store.local import LocalStore
from eagle3_core.store.samples import open_samples
from eagle3_core.target.info import TargetInfo
from eagle3_core.training.flops import DraftShape, training_flops
from eagle3_core.training.loader import PackReader, index_samples
from eagle3_core.training.steps import StepReader, plan_steps
from tests.training.examples import make_config, make_samples, write_inputs

pytestmark = pytest.mark.engine
SHAPE = DraftShape(64, 96, 4, 2, 16, 1, 64, 3)
TRAIN = TrainConfig(pack_tokens=48, packs_per_step=3)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetInfo) -> PackReader:
    root: Path = tmp_path_factory.mktemp("steps")
    samples = make_samples(tiny_target, 14, 4)
    spec = write_inputs(root, make_config(tiny_target.path), tiny_target, samples)
    store = LocalStore(root)
    source = open_samples(spec.config, store, store.read(spec.inputs["capture"]))
    return PackReader(source, index_samples(samples, source, {}).splits["train"], num_steps=3)


def steps_of(reader: PackReader) -> list[list[list[int]]]:
    return plan_steps([sample.num_tokens for sample in reader.samples], TRAIN, 0)


def test_ranks_plan_alike_and_share_all_packs(reader: PackReader) -> None:
    steps = steps_of(reader)
    for number, packs in enumerate(steps):
        plans = [StepReader(reader, SHAPE, rank, 2).plan(number, packs) for rank in range(2)]
        assert sorted(plans[0].mine + plans[1].mine) == list(range(len(packs)))
        assert (plans[0].counts, plans[0].keys) == (plans[1].counts, plans[1].keys)
        read = [reader.pack(members) for members in packs]
        assert plans[0].counts == [sum(counts) for counts in zip(*(p.plan.counts for p in read), strict=True)]
        assert plans[0].tokens == sum(pack.num_tokens for pack in read)
        assert plans[0].flops == sum(training_flops(pack.plan, SHAPE) for pack in read)
        assert plans[0].keys == tuple(key for pack in read for key in pack.keys)


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_reads_its_packs_in_order_and_hears_of_every_step(reader: PackReader, first: int) -> None:
    steps = steps_of(reader)
    for rank in range(4):
        steps_reader = StepReader(reader, SHAPE, rank, 4)
        parts = list(steps_reader.parts(steps, first))
        assert sorted({part.step.number for part in parts}) == list(range(first, len(steps)))
        for part in parts:
            assert (part.pack is None) == (not part.step.mine)
        keys = [part.pack.keys for part in parts if part.pack is not None]
        plans = [steps_reader.plan(number, steps[number]) for number in range(first, len(steps))]
        members = [plan.packs[index] for plan in plans for index in plan.mine]
        assert keys == [tuple(reader.samples[index].key for index in each) for each in members]


def test_packs_without_loss_are_named_and_belong_to_nobody(
    reader: PackReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = PackReader.loss_mask
    monkeypatch.setattr(PackReader, "loss_mask", lambda self, i: mask(self, i) & (i not in (0, 1)))
    plan = StepReader(reader, SHAPE).plan(0, [[0, 1], [2, 3]])
    assert plan.mine == (1,)
    assert plan.silent == ((reader.samples[0].key, reader.samples[1].key),)
    assert StepReader(reader, SHAPE).plan(0, [[0], [1]]).counts == [0, 0, 0]
