"""Comparisons with values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.capture.compare import (
    NextTokenCounts,
    checked_rows,
    layer_distances,
    match_next_tokens,
    nonfinite_counts,
    relative_errors,
)

pytestmark = pytest.mark.engine


def test_checked_rows_are_those_whose_next_token_was_generated_too() -> None:
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1], dtype=torch.uint8)
    stored = torch.tensor([2, 3, 4, 6])
    assert stored[checked_rows(mask, stored)].tolist() == [2, 3]
    assert checked_rows(mask, torch.arange(7)).tolist() == [2, 3]
    assert checked_rows(torch.zeros(3, dtype=torch.uint8), torch.arange(3)).tolist() == []


def test_a_near_tie_is_counted_as_one_and_a_clear_miss_as_none() -> None:
    logits = torch.tensor([[1.0, 4.0, 0.0], [10.0, 9.93, 0.0], [10.0, 9.9, 0.0], [0.0, 0.0, 1.0]])
    counts = NextTokenCounts.of(*match_next_tokens(logits, torch.tensor([1, 1, 1, 0])))
    assert counts == NextTokenCounts(rows=4, exact=1, ties=1)
    assert counts.agreement == 0.5
    assert NextTokenCounts().agreement == 0.0
    assert counts + counts == NextTokenCounts(8, 2, 2)


@pytest.mark.parametrize(
    ("rows", "misses", "hopeless"),
    [(2, 2, False), (3, 3, True), (6, 3, False), (7, 4, True), (100, 40, False)],
)
def test_a_sample_is_hopeless_if_most_rows_miss_and_more_than_two(
    rows: int, misses: int, hopeless: bool
) -> None:
    assert NextTokenCounts(rows, exact=rows - misses).is_hopeless is hopeless


def test_relative_error_is_per_row() -> None:
    reference = torch.tensor([[3.0, 4.0], [100.0, 0.0]])
    stored = reference + torch.tensor([[0.0, 0.5], [0.0, 1.0]])
    torch.testing.assert_close(relative_errors(stored, reference), torch.tensor([0.1, 0.01]))


def test_the_huge_first_token_does_not_hide_a_neighbouring_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(9, 4, 16, generator=generator)
    reference[0] = 1e4
    stored = reference[:, 1] + 0.001 * torch.randn(9, 16, generator=generator)
    rows = [torch.arange(9)]
    right = layer_distances(1, [stored], rows, [reference])
    assert right.is_right
    assert right.nearest_id == 1
    assert right.errors.shape == (8, 4)
    wrong = layer_distances(2, [stored], rows, [reference])
    assert not wrong.is_right
    assert wrong.nearest_id == 1
    whole = torch.linalg.matrix_norm(stored - reference[:, 2]) / torch.linalg.matrix_norm(reference[:, 2])
    assert whole < 0.001, "over the whole matrix the wrong layer looks right"


def test_a_layer_that_is_nearest_but_not_clearly_is_not_right() -> None:
    reference = torch.zeros(5, 2, 4)
    reference[:, 0, 0] = 1.0
    reference[:, 1, 0] = 1.3
    stored = reference[:, 0] + torch.tensor([0.1, 0.0, 0.0, 0.0])
    found = layer_distances(0, [stored], [torch.arange(5)], [reference])
    assert found.nearest_id == 0
    assert not found.is_right


def test_nan_and_inf_are_counted_by_layer() -> None:
    aux, final = torch.zeros(3, 2, 4), torch.zeros(1, 4)
    assert nonfinite_counts(aux, final) == []
    aux[1, 1, 2] = float("nan")
    final[0, :2] = float("-inf")
    assert nonfinite_counts(aux, final) == [(1, 1, 0), (2, 0, 2)]
    assert nonfinite_counts(aux[:0], final[:0]) == []
