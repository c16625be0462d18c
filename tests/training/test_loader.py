"""Packs: complete, deterministic, aligned; what is left out is named."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_core.errors import TrainingError
from eagle3_core.store.local import LocalStore
from eagle3_core.store.samples import SampleSource, open_samples
from eagle3_core.target.info import TargetInfo
from eagle3_core.training.ahead import SWITCH_SECONDS, ReadAhead
from eagle3_core.training.loader import (
    PackReader,
    build_pack,
    index_samples,
    plan_in_order,
    plan_packs,
)
from tests.training.examples import make_config, make_samples, random_sample, write_inputs

pytestmark = pytest.mark.engine


def test_every_sample_is_in_one_pack_and_packs_keep_to_their_size() -> None:
    lengths = np.random.default_rng(0).integers(5, 400, 300).tolist()
    packs = plan_packs(lengths, 1024, seed=1, epoch=0)
    assert sorted(index for pack in packs for index in pack) == list(range(300))
    sizes = [sum(lengths[index] for index in pack) for pack in packs]
    assert max(sizes) <= 1024
    assert len(packs) <= 1.1 * sum(lengths) / 1024 + 8


def test_order_follows_from_seed_and_epoch_alone() -> None:
    lengths = [10] * 50
    assert plan_packs(lengths, 40, 1, 2) == plan_packs(lengths, 40, 1, 2)
    assert plan_packs(lengths, 40, 1, 2) != plan_packs(lengths, 40, 1, 3)
    assert plan_packs(lengths, 40, 1, 2) != plan_packs(lengths, 40, 2, 2)


def test_a_sample_longer_than_a_pack_stands_alone() -> None:
    assert sorted(map(sorted, plan_in_order([3, 100, 4], 10))) == [[0, 2], [1]]


def test_alignment_of_a_pack_of_two_documents(tiny_target: TargetInfo) -> None:
    samples = [
        random_sample(tiny_target, [0, 0, 1, 1, 1], "a", 1),
        random_sample(tiny_target, [0, 1, 1, 0], "b", 2),
    ]
    pack = build_pack(samples, num_steps=2)
    a, b = samples
    assert pack.input_ids.tolist() == [*a.input_ids.tolist()[1:], *b.input_ids.tolist()[1:]]
    assert pack.positions.tolist() == [1, 2, 3, 4, 1, 2, 3]
    assert torch.equal(pack.aux_states[0], a.aux_states[0].flatten())
    assert torch.equal(pack.aux_states[4], b.aux_states[0].flatten())
    assert pack.plan.labels.tolist() == [1, 2, 3, 4, 5]
    assert torch.equal(pack.final_states, torch.cat([a.final_states, b.final_states]))
    assert pack.num_tokens == 9


def test_final_states_of_all_rows_are_narrowed_to_the_labels(tiny_target: TargetInfo) -> None:
    sample = random_sample(tiny_target, [0, 0, 1, 1])
    everything = torch.randn(4, tiny_target.hidden_size)
    whole = replace(sample, final_states=everything, final_rows=torch.arange(4))
    assert torch.equal(build_pack([whole], 1).final_states, everything[2:])


def test_missing_final_states_are_refused(tiny_target: TargetInfo) -> None:
    sample = random_sample(tiny_target, [0, 0, 1, 1])
    short = replace(sample, final_states=sample.final_states[:1], final_rows=sample.final_rows[:1])
    with pytest.raises(TrainingError, match=r"has 1 final states, not all of the 2"):
        build_pack([short], 1)


def _capture(root: Path, target: TargetInfo) -> tuple[list, SampleSource]:
    samples = make_samples(target)
    spec = write_inputs(root, make_config(target.path), target, samples)
    store = LocalStore(root)
    return samples, open_samples(spec.config, store, store.read(spec.inputs["capture"]))


def test_bad_samples_and_samples_without_loss_are_left_out_and_named(
    tmp_path: Path, tiny_target: TargetInfo
) -> None:
    samples, source = _capture(tmp_path, tiny_target)
    silent = replace(samples[1], loss_mask=np.zeros_like(samples[1].loss_mask))
    index = index_samples([samples[0], silent, *samples[2:]], source, {"sample-4": "NaN in layer 2"})
    assert [(each.key, each.reason) for each in index.skipped] == [
        ("sample-1", "no token after the first carries loss"),
        ("sample-4", "NaN in layer 2"),
    ]
    assert len(index.splits["train"]) == 10
    assert len(index.splits["heldout"]) == 4


def test_an_empty_split_is_refused_and_both_are_named(tmp_path: Path, tiny_target: TargetInfo) -> None:
    samples, source = _capture(tmp_path, tiny_target)
    with pytest.raises(TrainingError, match=r"heldout split has no sample.*the train split has 16"):
        index_samples([replace(s, split="train") for s in samples], source, {})


def test_a_sample_that_is_in_no_shard_is_refused(tmp_path: Path, tiny_target: TargetInfo) -> None:
    samples, source = _capture(tmp_path, tiny_target)
    with pytest.raises(TrainingError, match="sample stranger of the dataset is in none of the 2 shards"):
        index_samples([*samples, replace(samples[0], key="stranger")], source, {})


def test_reading_ahead_gives_the_planned_packs_and_passes_errors_on(
    tmp_path: Path, tiny_target: TargetInfo
) -> None:
    samples, source = _capture(tmp_path, tiny_target)
    index = index_samples(samples, source, {})
    reader = PackReader(source, index.splits["train"], num_steps=3)
    plan = plan_packs([sample.num_tokens for sample in reader.samples], 64, 0, 0)
    with ReadAhead(reader.packs(plan)) as packs:
        keys = [pack.keys for pack in packs]
    assert keys == [tuple(reader.samples[index].key for index in members) for members in plan]
    with pytest.raises(IndexError), ReadAhead(reader.packs([[10_000]])) as packs:
        next(packs)
    before = sys.getswitchinterval()
    with ReadAhead(reader.packs(plan)) as packs:  # a consumer that leaves early leaves no thread behind
        next(packs)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == before
