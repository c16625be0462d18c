"""silu(gate) * up and its gradient, in one pass each; twins of `pointwise._Gated`.

Legend: N rows, I intermediate size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4


def forward(both: Tensor, out: Tensor) -> None:
    """out [N, I] = silu(both[:, :I]) * both[:, I:]."""
    rows, width = out.shape
    if rows:
        _forward[(rows, triton.cdiv(width, BLOCK))](both, out, width, BLOCK=BLOCK, num_warps=WARPS)


def backward(both: Tensor, gradient: Tensor) -> None:
    """Replace gate and up in `both` by their gradients."""
    gradient = gradient.contiguous()
    rows, width = gradient.shape
    if rows:
        _backward[(rows, triton.cdiv(width, BLOCK))](both, gradient, width, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _forward(both, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    left = tl.load(both + row * 2 * width + cols, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(both + row * 2 * width + width + cols, mask=inside, other=0.0).to(tl.float32)
    value = left * tl.sigmoid(left) * right
    tl.store(out + row * width + cols, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(both, gradient, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    at = row * 2 * width + cols
    left = tl.load(both + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(both + at + width, mask=inside, other=0.0).to(tl.float32)
    wide = tl.load(gradient + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    chance = tl.sigmoid(left)
    grad_left = wide * right * chance * (1.0 + left * (1.0 - chance))
    tl.store(both + at, grad_left.to(both.dtype.element_ty), mask=inside)
    tl.store(both + at + width, (wide * left * chance).to(both.dtype.element_ty), mask=inside)
