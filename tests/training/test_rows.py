"""Which rows each TTT step computes and what they are compared with, worked out by hand."""

from __future__ import annotations

import numpy as np

from eagle3_core.training.rows import Run, plan_rows


def test_the_five_token_example_of_the_module() -> None:
    plan = plan_rows([4], np.array([False, True, True, True]), num_steps=2)
    assert plan.labels.tolist() == [1, 2, 3]
    first, second = plan.steps
    assert first.rows.tolist() == [0, 1, 2, 3]
    assert first.rows[first.loss].tolist() == [1, 2, 3]
    assert first.label.tolist() == [0, 1, 2]
    assert second.rows.tolist() == [0, 1, 2]
    assert second.rows[second.loss].tolist() == [0, 1, 2]
    assert second.label.tolist() == [0, 1, 2]
    assert second.kept.tolist() == [0, 1, 2]
    assert plan.counts == [3, 3]


def test_labels_never_cross_documents() -> None:
    mask = np.array([False, False, True, True, True, False])
    plan = plan_rows([3, 3], mask, num_steps=3)
    first, second, third = plan.steps
    assert plan.labels.tolist() == [2, 3, 4]
    # Label 3 is the first row of the second document: no earlier row of it can be compared with it.
    assert first.rows[first.loss].tolist() == [2, 3, 4]
    assert second.rows[second.loss].tolist() == [1, 3]
    assert second.label.tolist() == [0, 2]
    assert third.rows[third.loss].tolist() == [0]
    assert third.label.tolist() == [0]
    assert plan.counts == [3, 2, 1]


def test_only_rows_that_feed_a_loss_are_computed() -> None:
    mask = np.zeros(10, bool)
    mask[6:8] = True
    plan = plan_rows([10], mask, num_steps=3)
    assert plan.steps[0].rows.tolist() == [4, 5, 6, 7]
    assert plan.steps[1].rows.tolist() == [4, 5, 6]
    assert plan.steps[2].rows.tolist() == [4, 5]
    assert plan.steps[2].kept.tolist() == [0, 1]


def test_runs_end_at_gaps_and_document_borders() -> None:
    mask = np.array([True, False, False, True, True, True, False])
    plan = plan_rows([5, 2], mask, num_steps=1)
    assert plan.steps[0].rows.tolist() == [0, 3, 4, 5]
    assert plan.steps[0].runs == (Run(0, 1, 0, 1), Run(1, 3, 0, 5), Run(3, 4, 5, 6))
    assert plan.all_rows == (Run(0, 5, 0, 5), Run(5, 7, 5, 7))


def test_a_pack_without_loss_computes_nothing() -> None:
    plan = plan_rows([4], np.zeros(4, bool), num_steps=2)
    assert plan.counts == [0, 0]
    assert all(len(step.rows) == 0 and step.runs == () for step in plan.steps)
