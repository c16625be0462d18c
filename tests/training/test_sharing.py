"""Packs of a step are shared by cost, alike on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_core.config import parse_config
from eagle3_core.errors import TrainingError
from eagle3_core.training.sharing import group_packs, num_ranks, share_packs


def test_the_last_step_has_the_packs_that_are_left() -> None:
    assert [list(group) for group in group_packs(5, 2)] == [[0, 1], [2, 3], [4]]


def test_longest_first_evens_out_what_ranks_have_to_do() -> None:
    assert share_packs([5, 4, 3, 3], 2) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_every_pack_has_one_rank_and_no_rank_has_much_more_than_its_part(num_ranks: int) -> None:
    costs = np.random.default_rng(0).uniform(1, 3, 40).tolist()
    shares = share_packs(costs, num_ranks)
    assert sorted(index for share in shares for index in share) == list(range(40))
    loads = [sum(costs[index] for index in share) for share in shares]
    assert max(loads) <= sum(costs) / num_ranks + max(costs)


def test_ranks_beyond_the_packs_have_none() -> None:
    assert share_packs([1.0], 3) == [[0], [], []]


def test_training_on_gpus_is_refused_where_none_is_visible() -> None:
    config = parse_config({"name": "x", "target": {"model": "x"}, "engine": {"device": "cuda"}})
    assert num_ranks(config, 1) == 1
    with pytest.raises(TrainingError, match=r"no GPU is visible; expected one.*CUDA_VISIBLE_DEVICES"):
        num_ranks(config, 0)
