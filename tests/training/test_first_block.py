"""The hull that flash attention is given, with that kernel's meaning written out for the CPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3_core.training import first_block, layer, row_index
from eagle3_core.training.first_block import FirstBlock, Hull
from eagle3_core.training.loader import build_pack
from eagle3_core.training.loss import Teacher, pack_loss, step_weights
from eagle3_core.training.row_index import index_rows
from eagle3_core.training.rows import Run, plan_rows
from eagle3_core.training.ttt import ttt_forward
from tests.training.examples import make_config, make_vocabulary, random_sample

pytestmark = pytest.mark.engine
MASKS = ([0] * 7 + [1] * 5 + [0] * 6 + [1] * 4 + [0] * 3, [0] * 9, [0, 1], [0] * 3 + [1] * 9)
STEPS = 3


def _runs(hull: Hull) -> tuple[Run, ...]:
    ends = zip(pairwise(hull.query_ends.tolist()), pairwise(hull.key_ends.tolist()), strict=True)
    return tuple(Run(*queries, *keys) for queries, keys in ends)


def _flash_forward(
    queries: Tensor, keys: Tensor, values: Tensor, hull: Hull, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    return first_block.forward(queries, keys, values, FirstBlock(_runs(hull), None, window), scale)


def _flash_backward(
    grad_out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    hull: Hull,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    sums = torch.zeros_like(keys), torch.zeros_like(values)
    block = FirstBlock(_runs(hull), None, window)
    return first_block.backward(grad_out, queries, keys, values, out, lse, block, scale, sums), *sums


def test_a_hull_reaches_from_the_first_needed_row_to_the_end_of_each_document() -> None:
    mask = np.array([bit for values in MASKS for bit in values[1:]], bool)
    plan = plan_rows([len(values) - 1 for values in MASKS], mask, STEPS)
    index = index_rows(plan, torch.device("cpu"))
    assert index.steps[0].first.hull is None
    places, ends, longest = row_index._hull(plan.steps[1].rows, plan.offsets)
    # Documents of 24, 8, 1 and 11 rows; step 1 needs rows 4 to 9 and 15 to 19, none, none, and 0 to 9.
    assert ends.tolist() == [0, 20, 21, 22, 33]
    assert longest == 20
    assert places.tolist() == [*range(6), *range(11, 16), *range(22, 32)]


@pytest.mark.parametrize("window", [None, 4])
def test_a_step_over_hulls_equals_one_over_runs(
    window: int | None, tiny_target, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for with_hull in (False, True):
        torch.manual_seed(0)
        draft = _draft(tiny_target)
        draft.sliding_window, draft.sliding_window_indices = window, [] if window is None else [0]
        if with_hull:
            monkeypatch.setattr(row_index, "uses_hull", lambda _: True)
            monkeypatch.setattr(layer, "flash_is_usable", lambda *_: True)
            monkeypatch.setattr(first_block, "_flash_forward", _flash_forward)
            monkeypatch.setattr(first_block, "_flash_backward", _flash_backward)
        pack = build_pack([random_sample(tiny_target, m, str(i), i) for i, m in enumerate(MASKS)], STEPS)
        teacher = Teacher(torch.ones(64), 1e-6, draft.lm_head.weight.detach())
        hidden = ttt_forward(draft, pack, torch.float32)
        weights = step_weights(pack.plan.counts, 0.8)
        loss = pack_loss(hidden, draft.lm_head.weight, pack.final_states, teacher, pack.plan, weights).loss
        loss.backward()
        found.append([loss.detach(), *[p.grad for p in draft.parameters() if p.grad is not None]])
    assert len(found[0]) == len(found[1]) > 10
    for hull, runs in zip(found[1], found[0], strict=True):
        assert (hull - runs).norm() / runs.norm() < 1e-5


def _draft(target):
    from eagle3_core.training.draft import build_draft

    config = make_config()
    return build_draft(config, target, make_vocabulary(64, target.vocab_size))
