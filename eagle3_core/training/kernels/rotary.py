"""Rotary embedding of heads together with what is added before it, gathered and scattered by row.

Legend: N rows, h heads, d head size, S rows that are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from eagle3_core.training.heads import Turn


def forward(
    heads: Tensor,
    added: Tensor | None,
    rows: Tensor | None,
    turn: Turn | None,
    out: Tensor,
    places: Tensor | None,
) -> None:
    """Twin of `heads.rotate`."""
    count, number, depth = heads.shape
    if not count:
        return
    assert heads.stride()[1:] == out.stride()[1:] == (depth, 1)
    assert added is None or added.stride(1) == 1
    half = triton.next_power_of_2(depth // 2)
    _forward[(count,)](
        heads, heads.stride(0),
        heads if added is None else added, 0 if added is None else added.stride(0),
        heads if rows is None else rows,
        heads if turn is None else turn.cos, heads if turn is None else turn.sin,
        heads if turn is None else turn.positions,
        out, out.stride(0), heads if places is None else places,
        number, depth,
        HAS_ADDED=added is not None, TURN=turn is not None, HAS_PLACES=places is not None,
        HEADS=triton.next_power_of_2(number), HALF=half, num_warps=_warps(number, half),
    )  # fmt: skip


def backward(
    gradient: Tensor,
    places: Tensor | None,
    turn: Turn | None,
    out: Tensor,
    sums: Tensor | None,
    rows: Tensor | None,
) -> None:
    """Twin of `heads.rotate_back`."""
    count, number, depth = out.shape
    if not count:
        return
    assert gradient.stride()[1:] == out.stride()[1:] == (depth, 1)
    assert sums is None or sums.stride(1) == 1
    half = triton.next_power_of_2(depth // 2)
    _backward[(count,)](
        gradient, gradient.stride(0), gradient if places is None else places,
        gradient if turn is None else turn.cos, gradient if turn is None else turn.sin,
        gradient if turn is None else turn.positions,
        out, out.stride(0),
        gradient if sums is None else sums, 0 if sums is None else sums.stride(0),
        gradient if rows is None else rows,
        number, depth,
        HAS_SUMS=sums is not None, TURN=turn is not None, HAS_PLACES=places is not None,
        HEADS=triton.next_power_of_2(number), HALF=half, num_warps=_warps(number, half),
    )  # fmt: skip


def _warps(heads: int, half: int) -> int:
    return min(8, max(1, triton.next_power_of_2(heads) * half // 512))


@triton.jit(do_not_specialize_on_alignment=["rows", "positions", "places"])
def _forward(
    heads, stride, added, added_stride, rows, cos, sin, positions, out, out_stride, places, number, depth,
    HAS_ADDED: tl.constexpr, TURN: tl.constexpr, HAS_PLACES: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, col = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    half = depth // 2
    inside = (head < number) & (col < half)
    at = head * depth + col
    left = tl.load(heads + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(heads + row * stride + at + half, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        source = added + tl.load(rows + row).to(tl.int64) * added_stride
        left += tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        right += tl.load(source + at + half, mask=inside, other=0.0).to(tl.float32)
    if TURN:
        angle = tl.load(positions + row).to(tl.int64) * depth + col
        seen = col < half
        cos_left = tl.load(cos + angle, mask=seen, other=0.0)
        cos_right = tl.load(cos + angle + half, mask=seen, other=0.0)
        sin_left = tl.load(sin + angle, mask=seen, other=0.0)
        sin_right = tl.load(sin + angle + half, mask=seen, other=0.0)
        turned = left * cos_left - right * sin_left
        right = right * cos_right + left * sin_right
        left = turned
    place = row
    if HAS_PLACES:
        place = tl.load(places + row).to(tl.int64)
    target = out + place * out_stride + at
    tl.store(target, left.to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, right.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows", "positions", "places"])
def _backward(
    gradient, stride, places, cos, sin, positions, out, out_stride, sums, sums_stride, rows, number, depth,
    HAS_SUMS: tl.constexpr, TURN: tl.constexpr, HAS_PLACES: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, col = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    half = depth // 2
    inside = (head < number) & (col < half)
    at = head * depth + col
    place = row
    if HAS_PLACES:
        place = tl.load(places + row).to(tl.int64)
    source = gradient + place * stride + at
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    if TURN:
        angle = tl.load(positions + row).to(tl.int64) * depth + col
        seen = col < half
        cos_left = tl.load(cos + angle, mask=seen, other=0.0)
        cos_right = tl.load(cos + angle + half, mask=seen, other=0.0)
        sin_left = tl.load(sin + angle, mask=seen, other=0.0)
        sin_right = tl.load(sin + angle + half, mask=seen, other=0.0)
        turned = left * cos_left + right * sin_right
        right = right * cos_right - left * sin_left
        left = turned
    target = out + row * out_stride + at
    tl.store(target, left.to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, right.to(out.dtype.element_ty), mask=inside)
    if HAS_SUMS:
        total = sums + tl.load(rows + row).to(tl.int64) * sums_stride + at
        left += tl.load(total, mask=inside, other=0.0)
        right += tl.load(total + half, mask=inside, other=0.0)
        tl.store(total, left, mask=inside)
        tl.store(total + half, right, mask=inside)
