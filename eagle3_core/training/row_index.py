"""A row plan as index tensors on the device, sent there in one transfer.

Legend: R rows of a pack, N_k rows computed at step k, M_k loss rows of step k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagle3_core.training.first_block import FirstBlock, Hull
from eagle3_core.training.pointwise import Routes
from eagle3_core.training.rows import RowPlan


@dataclass(frozen=True)
class StepIndex:
    """One TTT step; all tensors int64.

    Attributes:
        rows: [N_k], rows of the pack that are computed.
        routes: which rows carry loss, and which the next step computes.
        tokens: [N_k], row + k: the row that read the same token at step 0.
        token_places: [N_k], where `tokens` stand among the rows of step 0.
        first: attention of `rows` over the first block.
    """

    rows: Tensor
    routes: Routes
    tokens: Tensor
    token_places: Tensor
    first: FirstBlock


@dataclass(frozen=True)
class RowIndex:
    """All steps of a pack.

    Attributes:
        num_rows: R.
        last_position: the highest position that a step reaches.
        all_rows: [R], 0 to R - 1.
        queries: [N_0], rows of step 0; None if they are all rows.
        first: attention of all rows over the first block.
        steps: those that have rows.
    """

    num_rows: int
    last_position: int
    all_rows: Tensor
    queries: Tensor | None
    first: FirstBlock
    steps: tuple[StepIndex, ...]


def index_rows(plan: RowPlan, device: torch.device) -> RowIndex:
    """The plan's index tensors.

    Args:
        plan: of a pack.
        device: where they are needed.
    """
    arrays: list[np.ndarray] = [np.arange(plan.offsets[-1]), np.array(plan.offsets)]
    hulls: list[tuple[int, int]] = []
    first = plan.steps[0].rows
    afters = [step.kept for step in plan.steps[1:]] + [np.zeros(0, np.int64)]
    for number, (step, after) in enumerate(zip(plan.steps, afters, strict=True)):
        tokens = step.rows + number
        places, ends, longest = _hull(step.rows, plan.offsets)
        hulls.append((int(ends[-1]), longest))
        arrays += [step.rows, tokens, np.searchsorted(first, tokens), places, ends]
        arrays += [step.loss, _inverse(step.loss, len(step.rows)), after, _inverse(after, len(step.rows))]
    all_rows, offsets, *tensors = send_arrays(arrays, device)
    lengths = np.diff(plan.offsets)
    max_keys, key_ends = int(lengths.max()), offsets.to(torch.int32)
    with_hull = uses_hull(device)
    steps = []
    for number, step in enumerate(plan.steps):
        if not len(step.rows):
            break
        rows, tokens, token_places, places, ends, *routes = tensors[9 * number : 9 * number + 9]
        for some in (0, 2):  # all rows in order need no index
            if len(routes[some]) == len(rows):
                routes[some] = routes[some + 1] = None
        size, longest = hulls[number]
        hull = Hull(
            None if size == len(rows) else places, size, ends.to(torch.int32), key_ends, longest, max_keys
        )
        steps.append(
            StepIndex(
                rows=rows,
                routes=Routes(*routes),
                tokens=tokens,
                token_places=token_places,
                first=FirstBlock(step.runs, hull if with_hull else None),
            )
        )
    whole = Hull(None, len(all_rows), key_ends, key_ends, max(2, max_keys), max_keys)
    return RowIndex(
        num_rows=len(all_rows),
        last_position=max_keys + len(plan.steps),
        all_rows=all_rows,
        queries=None if not steps or len(steps[0].rows) == len(all_rows) else steps[0].rows,
        first=FirstBlock(plan.all_rows, whole if with_hull else None),
        steps=tuple(steps),
    )


def _inverse(chosen: np.ndarray, count: int) -> np.ndarray:
    """[count], where each row stands among the chosen ones, -1 if it is none of them."""
    found = np.full(count, -1, np.int64)
    found[chosen] = np.arange(len(chosen))
    return found


def uses_hull(device: torch.device) -> bool:
    """Whether flash attention may be used there."""
    return device.type == "cuda"


def _hull(rows: np.ndarray, offsets: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Each document's rows from the first of `rows` to its end, or its last row if it has none of them.

    Returns:
        [N] where the rows stand in the hull, [documents + 1] cumulative sizes, and the largest size.
    """
    bounds = np.array(offsets)
    begin = np.searchsorted(rows, bounds[:-1])
    has = begin < np.searchsorted(rows, bounds[1:])
    starts = bounds[1:] - 1
    starts[has] = rows[begin[has]]
    sizes = bounds[1:] - starts
    ends = np.concatenate([[0], np.cumsum(sizes)])
    document = np.searchsorted(bounds, rows, side="right") - 1
    # A call with one query a document takes another path in torch's kernel, with another log-sum-exp layout.
    return ends[document] + rows - starts[document], ends, max(2, int(sizes.max()))


def send_arrays(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays on the device, by one asynchronous copy."""
    whole = torch.from_numpy(np.concatenate([array.astype(np.int64, copy=False) for array in arrays]))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return list(whole.split([len(array) for array in arrays]))
