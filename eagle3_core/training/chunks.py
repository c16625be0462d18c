"""Cuts the loss rows of all TTT steps into chunks of labels, so that a chunk's logits fit in memory.

Legend: n labels, M_k loss rows of step k, M loss rows of all steps, m those of a chunk, T steps.

Label j is read by up to T loss rows, one a step. A chunk is a range of labels with all rows that read them:
the teacher's logits of a label are made once, and rows that read the same ones stand together. Five labels,
two steps, two chunks:

    rows of step 0 read labels    0 1 2 3 4        step-major order of rows    0 1 2 3 4 | 5 6 7
    rows of step 1 read labels    1 2 4            label-major order           0 1 5 2 6 | 3 4 7
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle3_core.training.rows import RowPlan


@dataclass(frozen=True)
class Chunk:
    """Labels [start, end), and the rows [first, last) in label-major order that read them."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True)
class LossRows:
    """All loss rows of a pack.

    Attributes:
        order: [M] int64, label-major to step-major: where a chunk's rows stand among the steps' rows.
        inverse: [M] int64, the other way.
        label: [M] int64, label-major, label of each row less its chunk's `start`.
        step: [M] int64, label-major, TTT step of each row.
        chunks: in order of labels.
    """

    order: np.ndarray
    inverse: np.ndarray
    label: np.ndarray
    step: np.ndarray
    chunks: tuple[Chunk, ...]


def chunk_rows(plan: RowPlan, max_rows: int) -> LossRows:
    """Chunks of about equal numbers of labels, with at most `max_rows` rows each (but one label at least).

    Args:
        plan: of the pack.
        max_rows: rows of all steps in a chunk.
    """
    num_labels, num_steps = len(plan.labels), max(1, len(plan.steps))
    pieces = -(-num_labels // max(1, max_rows // num_steps)) if num_labels else 0
    bounds = np.linspace(0, num_labels, pieces + 1).round().astype(np.int64)
    label = np.concatenate([step.label for step in plan.steps])
    step = np.repeat(np.arange(len(plan.steps)), plan.counts)
    order = np.argsort(label, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    label, step = label[order], step[order]
    cuts = np.searchsorted(label, bounds)
    starts = np.repeat(bounds[:-1], np.diff(cuts))
    chunks = tuple(
        Chunk(int(bounds[i]), int(bounds[i + 1]), int(cuts[i]), int(cuts[i + 1])) for i in range(pieces)
    )
    return LossRows(order, inverse, label - starts, step, chunks)
