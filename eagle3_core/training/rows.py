"""Which rows each TTT step computes, and which of them a loss reads: index arithmetic only.

Legend: S tokens of a document, R rows of a pack, T TTT steps, N_k rows computed at step k, M_k loss rows of
step k, n labels (rows that a loss term reads).

A document of S tokens has S - 1 rows. Row t pairs token x[t+1] with auxiliary states g[t], the teacher's
final state y[t+1] and the mask l[t+1]. At step k, row t reads x[t+1+k] and is compared with y[t+1+k] (the
teacher's distribution of x[t+2+k]) if l[t+1+k] = 1. Five tokens, prompt of two, T = 2:

    j        0    1    2    3    4
    x        p    p    a    b    end
    l        0    0    1    1    1

    row t    reads at step 0   compared with   reads at step 1   compared with
    0        x1, g0            -               x2                y2  (l2 = 1)
    1        x2, g1            y2  (l2 = 1)    x3                y3  (l3 = 1)
    2        x3, g2            y3  (l3 = 1)    x4                y4  (l4 = 1)
    3        x4, g3            y4  (l4 = 1)    outside           outside

Label r of a pack is the row t = r whose mask is set: it is read by row r at step 0, by row r - 1 at step 1,
and so on, never by a row of another document. A row is needed at step k if it carries loss at k or later:
here rows 0 to 3 at step 0 (row 0 only because of step 1), rows 0 to 2 at step 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Run:
    """Consecutive query rows of one document and the first-block rows that they see.

    Queries [query_start, query_end) index a step's rows, keys [key_start, key_end) the rows of the pack; the
    last query sees all keys, the one before it all but the last, and so on.
    """

    query_start: int
    query_end: int
    key_start: int
    key_end: int


@dataclass(frozen=True)
class StepRows:
    """One TTT step of a pack.

    Attributes:
        rows: [N_k] int64, rows of the pack that are computed, increasing.
        kept: [N_k] int64, where they stand among the previous step's rows (for step 0: `rows` itself).
        loss: [M_k] int64, where the rows with loss stand in `rows`.
        label: [M_k] int64, the label that each is compared with, increasing.
        runs: attention over the first block.
    """

    rows: np.ndarray
    kept: np.ndarray
    loss: np.ndarray
    label: np.ndarray
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class RowPlan:
    """All steps of a pack.

    Attributes:
        offsets: row of each document's first row, and R.
        labels: [n] int64, rows whose mask is set.
        steps: one entry a TTT step.
        all_rows: attention of a layer that computes every row of the first block.
    """

    offsets: tuple[int, ...]
    labels: np.ndarray
    steps: tuple[StepRows, ...]
    all_rows: tuple[Run, ...]

    @property
    def counts(self) -> list[int]:
        """Loss rows of each step (n_k)."""
        return [len(step.loss) for step in self.steps]


def plan_rows(lengths: Sequence[int], mask: np.ndarray, num_steps: int) -> RowPlan:
    """The rows of each step.

    Args:
        lengths: rows of each document in the pack (tokens - 1).
        mask: [R] bool, l[t+1] of row t.
        num_steps: T.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ends = np.repeat(offsets[1:], lengths)
    number = np.cumsum(mask) - 1
    labels = np.flatnonzero(mask)
    carries = [_shifted(mask, ends, step) for step in range(num_steps)]
    needed = np.zeros(len(mask), bool)
    masks: list[np.ndarray] = []
    for loss in reversed(carries):
        needed = needed | loss
        masks.insert(0, needed)
    steps, previous = [], np.arange(len(mask))
    for step, (loss, wanted) in enumerate(zip(carries, masks, strict=True)):
        rows = np.flatnonzero(wanted)
        steps.append(
            StepRows(
                rows=rows,
                kept=np.searchsorted(previous, rows),
                loss=np.flatnonzero(loss[rows]),
                label=number[np.flatnonzero(loss) + step],
                runs=_runs(rows, offsets),
            )
        )
        previous = rows
    everything = tuple(Run(int(a), int(b), int(a), int(b)) for a, b in pairwise(offsets))
    return RowPlan(tuple(offsets.tolist()), labels, tuple(steps), everything)


def _shifted(mask: np.ndarray, ends: np.ndarray, step: int) -> np.ndarray:
    """For row t: whether row t + step of the same document has its mask set."""
    there = np.arange(len(mask)) + step
    inside = there < ends
    return inside & mask[np.where(inside, there, 0)]


def _runs(rows: np.ndarray, offsets: np.ndarray) -> tuple[Run, ...]:
    """Cut increasing rows where they skip one or enter another document."""
    if not len(rows):
        return ()
    document = np.searchsorted(offsets, rows, side="right") - 1
    cuts = 1 + np.flatnonzero((np.diff(rows) != 1) | (np.diff(document) != 0))
    bounds = [0, *cuts.tolist(), len(rows)]
    return tuple(
        Run(start, end, int(offsets[document[start]]), int(rows[end - 1]) + 1)
        for start, end in pairwise(bounds)
    )
