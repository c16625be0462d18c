"""Forward KL of rows of logits, their greedy choices and their gradient, which replaces the logits.

Legend: m rows of a chunk, n labels of a chunk, D draft vocabulary.

One program reads a row twice: once for its maximum, its sum of exponentials and the cross term with the
teacher, once to replace it by weight * (q - p). Sums are fp32 whatever the logits are; the teacher's
probabilities are made from its logits and their log-sum-exp where they are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


def teacher_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and sum p log p of rows of teacher logits, [n] fp32 each from [n, D]."""
    rows, width = logits.shape
    lse, negative_entropy = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _teacher[(rows,)](
            logits, logits.stride(0), lse, negative_entropy, width, BLOCK=BLOCK, num_warps=WARPS
        )
    return lse, negative_entropy


def kl_rows(
    logits: Tensor,
    teacher: Tensor,
    sums: tuple[Tensor, Tensor],
    label: Tensor,
    weight: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Losses and greedy choices of rows, [m] each; the logits become weight * gradient if it is wanted.

    Args:
        logits: [m, D] of the draft.
        teacher: [n, D] logits.
        sums: of `teacher`, from `teacher_sums`.
        label: [m] int64, row of `teacher` that each is compared with.
        weight: [m] fp32, factor of each row's gradient.
        with_gradient: whether the logits are replaced.
    """
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    choices = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _kl[(rows,)](
            logits, logits.stride(0), teacher, teacher.stride(0), *sums, label, weight, losses, choices,
            width,
            WITH_GRADIENT=with_gradient, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses, choices


@triton.jit
def _teacher(logits, stride, lse, negative_entropy, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    top = tl.full([1], -float("inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    mean = tl.zeros([1], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < width
        z = tl.load(source + cols, mask=inside, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(z, axis=0))
        old, share = tl.exp(top - new), tl.exp(z - new)
        total = total * old + tl.sum(share, axis=0)
        mean = mean * old + tl.sum(tl.where(inside, share * z, 0.0), axis=0)
        top = new
    found = top + tl.log(total)
    one = tl.arange(0, 1)
    tl.store(lse + row + one, found)
    tl.store(negative_entropy + row + one, mean / total - found)


@triton.jit
def _kl(
    logits, stride, teacher, teacher_stride, teacher_lse, negative_entropy, label, weight, losses, choices,
    width, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(label + row).to(tl.int64)
    source, truth = logits + row * stride, teacher + number * teacher_stride
    shift = tl.load(teacher_lse + number)
    one = tl.arange(0, 1)
    top = tl.full([1], -float("inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    cross = tl.zeros([1], dtype=tl.float32)
    best = tl.zeros([1], dtype=tl.int32)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < width
        z = tl.load(source + cols, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(truth + cols, mask=inside, other=-float("inf")).to(tl.float32)
        here = tl.max(z, axis=0)
        best = tl.where(here > top, start + tl.argmax(z, axis=0), best)
        new = tl.maximum(top, here)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), axis=0)
        cross += tl.sum(tl.where(inside, tl.exp(t - shift) * z, 0.0), axis=0)
        top = new
    lse = top + tl.log(total)
    tl.store(losses + row + one, tl.load(negative_entropy + number) - cross + lse)
    tl.store(choices + row + one, best.to(tl.int64))
    if WITH_GRADIENT:
        factor = tl.load(weight + row)
        for start in range(0, width, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            inside = cols < width
            z = tl.load(source + cols, mask=inside, other=-float("inf")).to(tl.float32)
            t = tl.load(truth + cols, mask=inside, other=-float("inf")).to(tl.float32)
            grad = factor * (tl.exp(z - lse) - tl.exp(t - shift))
            tl.store(source + cols, grad.to(logits.dtype.element_ty), mask=inside)
