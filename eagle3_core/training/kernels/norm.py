"""RMSNorm with the addition to the residual stream before it; one program reads a row once.

Legend: N rows, H hidden size, P programs of the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from eagle3_core.training.pointwise import Routes

PROGRAMS = 264
"""Programs of the backward pass: each sums the weights' gradient over its rows, then torch over programs."""


def forward(
    states: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, routes: Routes
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of `pointwise._norm_forward`."""
    states = states.contiguous()
    rows, width = states.shape
    total = states if delta is None else torch.empty_like(states, dtype=torch.float32)
    after = total if routes.after is None else total.new_empty(len(routes.after), width)
    rate = torch.empty(rows, dtype=torch.float32, device=states.device)
    if rows:
        block = triton.next_power_of_2(width)
        _forward[(rows,)](
            states, states if delta is None else delta, weight, total, out, after, rate,
            _or(routes.loss_at, rate), _or(routes.after_at, rate), width, eps,
            HAS_DELTA=delta is not None, HAS_LOSS_AT=routes.loss_at is not None,
            HAS_AFTER_AT=routes.after_at is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return total, rate, after


def backward(
    grad_after: Tensor | None,
    grad_normal: Tensor | None,
    total: Tensor,
    rate: Tensor,
    weight: Tensor,
    grad_delta: Tensor | None,
    routes: Routes,
) -> tuple[Tensor, Tensor]:
    """Twin of `pointwise._norm_backward`."""
    rows, width = total.shape
    grad = torch.empty(rows, width, dtype=torch.float32, device=total.device)
    programs = min(rows, PROGRAMS)
    partial = torch.empty(max(1, programs), width, dtype=torch.float32, device=total.device)
    if not rows:
        return grad, partial.zero_()[0]
    grad_normal = None if grad_normal is None else grad_normal.contiguous()
    grad_after = None if grad_after is None else grad_after.contiguous()
    block = triton.next_power_of_2(width)
    _backward[(programs,)](
        _or(grad_after, grad), _or(grad_normal, grad), total, rate, weight, grad, _or(grad_delta, grad),
        partial, _or(routes.loss_at, rate), _or(routes.after_at, rate), rows, width,
        HAS_AFTER=grad_after is not None, HAS_NORMAL=grad_normal is not None,
        HAS_DELTA=grad_delta is not None, HAS_LOSS_AT=routes.loss_at is not None,
        HAS_AFTER_AT=routes.after_at is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return grad, partial.sum(0)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel wants some pointer, though it does not use it."""
    return other if tensor is None else tensor


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 16


@triton.jit(do_not_specialize_on_alignment=["loss_at", "after_at"])
def _forward(
    states, delta, weight, total, out, after, rate, loss_at, after_at, width, eps,
    HAS_DELTA: tl.constexpr, HAS_LOSS_AT: tl.constexpr, HAS_AFTER_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    at = row * width + cols
    wide = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        wide += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, wide, mask=inside)
    if HAS_AFTER_AT:
        place = tl.load(after_at + row).to(tl.int64)
        tl.store(after + place * width + cols, wide, mask=inside & (place >= 0))
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    tl.store(rate + row, scale)
    factor = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    wanted = inside
    if HAS_LOSS_AT:
        place = tl.load(loss_at + row).to(tl.int64)
        at = place * width + cols
        wanted = inside & (place >= 0)
    tl.store(out + at, (wide * scale * factor).to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["loss_at", "after_at"])
def _backward(
    grad_after, grad_normal, total, rate, weight, grad, grad_delta, partial, loss_at, after_at, rows, width,
    HAS_AFTER: tl.constexpr, HAS_NORMAL: tl.constexpr, HAS_DELTA: tl.constexpr,
    HAS_LOSS_AT: tl.constexpr, HAS_AFTER_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    factor = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    row = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * width + cols
        found = tl.zeros([BLOCK], dtype=tl.float32)
        if HAS_NORMAL:
            place = row
            if HAS_LOSS_AT:
                place = tl.load(loss_at + row).to(tl.int64)
            source = grad_normal + place * width + cols
            wide = tl.load(source, mask=inside & (place >= 0), other=0.0).to(tl.float32)
            scale = tl.load(rate + row)
            unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * scale
            summed += wide * unit
            along = wide * factor
            found = scale * (along - unit * (tl.sum(along * unit, axis=0) / width))
        if HAS_AFTER:
            place = row
            if HAS_AFTER_AT:
                place = tl.load(after_at + row).to(tl.int64)
            source = grad_after + place * width + cols
            found += tl.load(source, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        tl.store(grad + at, found, mask=inside)
        if HAS_DELTA:
            tl.store(grad_delta + at, found.to(grad_delta.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    tl.store(partial + tl.program_id(0).to(tl.int64) * width + cols, summed, mask=inside)
