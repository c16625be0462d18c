"""Chunks of loss rows, by hand and as a whole."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_core.training.chunks import Chunk, chunk_rows
from eagle3_core.training.rows import plan_rows

pytestmark = pytest.mark.engine


def test_the_rows_that_read_a_label_stand_together() -> None:
    # Two documents of three and four rows: labels are rows 0, 1, 2 and 4, 5; step 1 reads 1, 2 and 4, 5.
    plan = plan_rows([3, 4], np.array([1, 1, 1, 0, 1, 1, 0], bool), 2)
    assert [step.label.tolist() for step in plan.steps] == [[0, 1, 2, 3, 4], [1, 2, 3, 4]]
    rows = chunk_rows(plan, 6)
    assert rows.chunks == (Chunk(0, 2, 0, 3), Chunk(2, 5, 3, 9))
    assert rows.order.tolist() == [0, 1, 5, 2, 6, 3, 7, 4, 8]
    assert rows.label.tolist() == [0, 1, 1, 0, 0, 1, 1, 2, 2]
    assert rows.step.tolist() == [0, 0, 1, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("max_rows", [1, 7, 50, 10_000])
def test_every_row_is_in_one_chunk_with_its_label(max_rows: int) -> None:
    mask = np.random.default_rng(0).random(90) < 0.6
    plan = plan_rows([40, 1, 49], mask, 4)
    rows = chunk_rows(plan, max_rows)
    label = np.concatenate([step.label for step in plan.steps])
    assert rows.order[rows.inverse].tolist() == list(range(len(label)))
    assert [(c.first, c.last) for c in rows.chunks] == [
        (c.first, c.last) for c in sorted(rows.chunks, key=lambda chunk: chunk.first)
    ]
    assert sum(chunk.last - chunk.first for chunk in rows.chunks) == len(label)
    for chunk in rows.chunks:
        part = slice(chunk.first, chunk.last)
        assert (rows.label[part] + chunk.start == label[rows.order[part]]).all()
        assert (rows.label[part] < chunk.end - chunk.start).all()
        assert chunk.last - chunk.first <= max(max_rows, 4)


def test_a_pack_without_loss_has_no_chunks() -> None:
    rows = chunk_rows(plan_rows([5], np.zeros(5, bool), 3), 100)
    assert rows.chunks == ()
    assert len(rows.order) == 0
