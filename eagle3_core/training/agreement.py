"""Agreement of a draft with the target's greedy choice over its FULL vocabulary, by TTT step.

Legend: R rows of a pack, n labels, M_k loss rows of step k, K steps unrolled.

A draft cannot choose a token outside its vocabulary, so a label whose argmax is one is a miss. Conditional
agreement of step k is counted over rows that agreed at all steps before; with c_k as these rates, greedy
drafting of K tokens gains 1 + c_0 + c_0 c_1 + ... tokens a pass of the target, the target's own one counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from torch import Tensor

from eagle3_core.training.rows import RowPlan


@dataclass(frozen=True)
class StepRates:
    """Agreement on loss rows, by TTT step.

    Attributes:
        unconditional: share of rows that agree at step k.
        conditional: share of rows that agree at step k among those that agreed at all steps before.
        rows: loss rows of step k.
    """

    unconditional: list[float]
    conditional: list[float | None]
    rows: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens that a pass of the target would produce, the bonus token counted, at K = all steps."""
        return 1.0 + sum(accumulate((rate or 0.0 for rate in self.conditional), mul))

    def figures(self) -> dict[str, Any]:
        """The rates for the metrics, to four digits."""
        return {
            "unconditional": [round(rate, 4) for rate in self.unconditional],
            "conditional": [None if rate is None else round(rate, 4) for rate in self.conditional],
            "acceptance_length": round(self.acceptance_length, 4),
        }


class Agreement:
    """Counts hits over packs, and over ranks.

    Attributes:
        counts: [4, K] int64: loss rows, those that agree, those that agree at this and all steps before, and
            those that agree at all steps before.
    """

    def __init__(self, num_steps: int) -> None:
        self.counts = np.zeros((4, num_steps), np.int64)

    @classmethod
    def of(cls, counts: Sequence[float]) -> Agreement:
        """From 4 K counts, row by row."""
        made = cls(len(counts) // 4)
        made.counts[:] = np.reshape(counts, made.counts.shape)
        return made

    def join(self, other: Agreement) -> None:
        """Add what another has counted."""
        self.counts += other.counts

    def add(self, plan: RowPlan, choices: Sequence[Tensor], argmax: Tensor) -> None:
        """Add a pack.

        Args:
            plan: of the pack.
            choices: [M_k] of each step, target ids of the draft's greedy choices, on the CPU.
            argmax: [n] target ids of the labels, on the CPU.
        """
        num_rows, hits, agreed, possible = self.counts
        wanted = argmax.numpy()
        alive = np.ones(plan.offsets[-1], bool)
        for number, (step, ids) in enumerate(zip(plan.steps, choices, strict=True)):
            rows = step.rows[step.loss]
            right = ids.numpy() == wanted[step.label]
            before, alive = alive[rows], np.zeros_like(alive)
            alive[rows] = before & right
            num_rows[number] += len(rows)
            hits[number] += right.sum()
            possible[number] += before.sum()
            agreed[number] += alive.sum()

    def rates(self) -> StepRates:
        """Agreement of everything added."""
        num_rows, hits, agreed, possible = self.counts
        return StepRates(
            unconditional=(hits / np.maximum(1, num_rows)).tolist(),
            conditional=[
                int(yes) / int(of) if of else None for yes, of in zip(agreed, possible, strict=True)
            ],
            rows=num_rows.tolist(),
        )
