"""How sequences are put together for one forward."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.capture.reference_batch import make_batch, plan_batches

pytestmark = pytest.mark.engine

A, B = torch.tensor([5, 6, 7]), torch.tensor([8, 9])


def test_padding_is_on_the_right_and_masked() -> None:
    batch = make_batch([A, B], "padded")
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.attention_mask is not None
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert [(row, tokens.start, tokens.stop) for row, tokens in batch.places] == [(0, 0, 3), (1, 0, 2)]


def test_packed_positions_start_again_with_each_sequence() -> None:
    batch = make_batch([A, B], "packed")
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.attention_mask is None
    assert [(row, tokens.start, tokens.stop) for row, tokens in batch.places] == [(0, 0, 3), (0, 3, 5)]


def test_a_single_sequence_is_given_as_it_is() -> None:
    assert {name: ids.tolist() for name, ids in make_batch([A], "single").inputs().items()} == {
        "input_ids": [[5, 6, 7]]
    }


def test_batches_hold_at_most_the_tokens_allowed_or_one_sequence() -> None:
    lengths = [4, 9, 2, 30, 4, 3]
    assert plan_batches(lengths, 10, "single") == [[0], [1], [2], [3], [4], [5]]
    assert plan_batches(lengths, 10, "packed") == [[0], [1], [2], [3], [4, 5]]
    assert plan_batches(lengths, 15, "packed") == [[0, 1, 2], [3], [4, 5]]
    assert plan_batches(lengths, 10, "padded") == [[2, 5], [0, 4], [1], [3]]
    assert plan_batches(lengths, 16, "padded") == [[2, 5, 0, 4], [1], [3]]
    assert plan_batches([], 16, "padded") == []
