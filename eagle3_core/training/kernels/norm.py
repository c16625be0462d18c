"""RMSNorm with the addition to the residual stream before it; one program reads a row once.

Legend: N rows, H hidden size, P programs of the backward pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024
"""Programs of the backward pass: each sums the weights' gradient over its rows, then torch over programs."""


def forward(
    states: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    """Twin of `pointwise._norm_forward`: (states + delta in fp32, or states), and 1 / rms, [N]."""
    states = states.contiguous()
    rows, width = states.shape
    total = states if delta is None else torch.empty_like(states, dtype=torch.float32)
    rate = torch.empty(rows, dtype=torch.float32, device=states.device)
    if rows:
        block = triton.next_power_of_2(width)
        _forward[(rows,)](
            states, states if delta is None else delta, weight, total, out, rate, width, eps,
            HAS_DELTA=delta is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return total, rate


def backward(
    grad_total: Tensor | None,
    grad_normal: Tensor,
    total: Tensor,
    rate: Tensor,
    weight: Tensor,
    grad_delta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Twin of `pointwise._norm_backward`; the gradient by the states is also written to `grad_delta`."""
    rows, width = total.shape
    grad = torch.empty(rows, width, dtype=torch.float32, device=total.device)
    programs = min(rows, PROGRAMS)
    partial = torch.empty(max(1, programs), width, dtype=torch.float32, device=total.device)
    if not rows:
        return grad, partial.zero_()[0]
    grad_normal = grad_normal.contiguous()
    grad_total = None if grad_total is None else grad_total.contiguous()
    block = triton.next_power_of_2(width)
    _backward[(programs,)](
        grad if grad_total is None else grad_total, grad_normal, total, rate, weight, grad,
        grad if grad_delta is None else grad_delta, partial, rows, width,
        HAS_TOTAL=grad_total is not None, HAS_DELTA=grad_delta is not None, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip
    return grad, partial.sum(0)


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


@triton.jit
def _forward(
    states, delta, weight, total, out, rate, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    at = row * width + cols
    wide = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        wide += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + at, wide, mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    tl.store(rate + row, scale)
    factor = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (wide * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_total, grad_normal, total, rate, weight, grad, grad_delta, partial, rows, width,
    HAS_TOTAL: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    factor = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    row = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * width + cols
        scale = tl.load(rate + row)
        unit = tl.load(total + at, mask=inside, other=0.0).to(tl.float32) * scale
        wide = tl.load(grad_normal + at, mask=inside, other=0.0).to(tl.float32)
        summed += wide * unit
        along = wide * factor
        found = scale * (along - unit * (tl.sum(along * unit, axis=0) / width))
        if HAS_TOTAL:
            found += tl.load(grad_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + at, found, mask=inside)
        if HAS_DELTA:
            tl.store(grad_delta + at, found.to(grad_delta.dtype.element_ty), mask=inside)
        row += tl.num_programs(0)
    tl.store(partial + tl.program_id(0).to(tl.int64) * width + cols, summed, mask=inside)
