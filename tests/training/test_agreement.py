"""Agreement with the target's full argmax, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eagle3_core.training.agreement import Agreement, StepRates
from eagle3_core.training.rows import plan_rows

pytestmark = pytest.mark.engine


def test_rates_are_counted_over_the_rows_that_agreed_at_all_steps_before() -> None:
    """Rows 1 to 3 of five tokens carry loss: step 0 reads labels 0 1 2 from rows 1 2 3, step 1 from 0 1 2."""
    plan = plan_rows([4], np.array([False, True, True, True]), 2)
    agreement = Agreement(2)
    argmax = torch.tensor([7, 8, 9], dtype=torch.int32)
    agreement.add(plan, [torch.tensor([7, 8, 0]), torch.tensor([7, 0, 9])], argmax)
    rates = agreement.rates()
    assert rates.rows == [3, 3]
    assert rates.unconditional == [pytest.approx(2 / 3), pytest.approx(2 / 3)]
    # Of rows 1 and 2, which agreed at step 0, row 2 agrees again; row 0 had no label at step 0.
    assert rates.conditional == [pytest.approx(2 / 3), pytest.approx(1 / 2)]
    assert rates.acceptance_length == pytest.approx(1 + 2 / 3 + 1 / 3)


def test_a_label_that_the_draft_cannot_say_is_a_miss() -> None:
    plan = plan_rows([2], np.array([True, True]), 1)
    agreement = Agreement(1)
    sayable = torch.tensor([3, 5])
    agreement.add(plan, [sayable[torch.tensor([0, 1])]], torch.tensor([3, 4], dtype=torch.int32))
    assert agreement.rates().unconditional == [0.5]


def test_counts_of_ranks_add_up_also_as_plain_numbers() -> None:
    plan = plan_rows([4], np.array([False, True, True, True]), 2)
    packs = (([7, 8, 0], [7, 0, 9]), ([7, 8, 9], [7, 8, 0]))
    together, ranks = Agreement(2), [Agreement(2), Agreement(2)]
    for rank, chosen in zip(ranks, packs, strict=True):
        for counted in (together, rank):
            counted.add(plan, [torch.tensor(ids) for ids in chosen], torch.tensor([7, 8, 9]))
    sent = np.sum([rank.counts.ravel() for rank in ranks], axis=0).astype(float).tolist()
    assert Agreement.of(sent).rates() == together.rates()
    ranks[0].join(ranks[1])
    assert ranks[0].rates() == together.rates()


def test_without_a_chance_there_is_no_rate_and_nothing_is_gained() -> None:
    rates = StepRates([0.0, 0.0], [0.0, None], [3, 2])
    assert rates.figures() == {
        "unconditional": [0.0, 0.0], "conditional": [0.0, None], "acceptance_length": 1.0,
    }  # fmt: skip
