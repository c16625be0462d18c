"""Losses of rows of logits, their greedy choices and their gradients, which replace the logits.

Legend: m rows of a chunk, n labels of a chunk, D draft vocabulary; p, q, w, b as in `losses`.

One program reads a row twice: once for its maximum, its sum of exponentials and the cross term with the
teacher, once to replace it by weight * gradient; `acceptance` takes one more pass for its overlap. Sums are
fp32 whatever the logits are; the teacher's probabilities are made from its logits and their log-sum-exp where
they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagle3_core.sections import LossConfig

BLOCK, WARPS = 2048, 4
KINDS = {"kl": 0, "cross_entropy": 1, "acceptance": 2}
KL, CROSS_ENTROPY, ACCEPTANCE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class TeacherSums:
    """Of rows of teacher logits, [n] each: log-sum-exp, sum p log p, and the likeliest draft id."""

    lse: Tensor
    negative_entropy: Tensor
    choice: Tensor


def teacher_sums(logits: Tensor) -> TeacherSums:
    """What the losses need of a teacher's logits, [n, D]."""
    rows, width = logits.shape
    lse, negative_entropy = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    choice = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _teacher[(rows,)](
            logits, logits.stride(0), lse, negative_entropy, choice, width, BLOCK=BLOCK, num_warps=WARPS
        )
    return TeacherSums(lse, negative_entropy, choice)


def losses_of_rows(
    loss: LossConfig,
    logits: Tensor,
    teacher: Tensor,
    sums: TeacherSums,
    label: Tensor,
    weight: Tensor,
    with_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Losses and greedy choices of rows, [m] each; the logits become weight * gradient if it is wanted.

    Args:
        loss: which loss, and its weights.
        logits: [m, D] of the draft.
        teacher: [n, D] logits.
        sums: of `teacher`.
        label: [m] int64, row of `teacher` that each is compared with.
        weight: [m] fp32, factor of each row's gradient.
        with_gradient: whether the logits are replaced.
    """
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    choices = torch.empty(rows, dtype=torch.int64, device=logits.device)
    eta = loss.acceptance_eta
    if rows:
        _losses[(rows,)](
            logits, logits.stride(0), teacher, teacher.stride(0), sums.lse, sums.negative_entropy,
            sums.choice, label, weight, losses, choices, width,
            float(loss.acceptance_weight) if eta is None else float(eta),
            KIND=KINDS[loss.kind], FIXED=eta is None, WITH_GRADIENT=with_gradient, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return losses, choices


@triton.jit
def _row(source, start, width, BLOCK: tl.constexpr):
    """A block of logits in fp32, -inf outside, and its columns."""
    cols = start + tl.arange(0, BLOCK)
    return tl.load(source + cols, mask=cols < width, other=-float("inf")).to(tl.float32), cols


@triton.jit(do_not_specialize_on_alignment=["lse", "negative_entropy"])
def _teacher(logits, stride, lse, negative_entropy, choice, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source, one = logits + row * stride, tl.arange(0, 1)
    top = tl.full([1], -float("inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    mean = tl.zeros([1], dtype=tl.float32)
    best = tl.zeros([1], dtype=tl.int32)
    for start in range(0, width, BLOCK):
        z, cols = _row(source, start, width, BLOCK)
        here = tl.max(z, axis=0)
        best = tl.where(here > top, start + tl.argmax(z, axis=0), best)
        new = tl.maximum(top, here)
        old, share = tl.exp(top - new), tl.exp(z - new)
        total = total * old + tl.sum(share, axis=0)
        mean = mean * old + tl.sum(tl.where(cols < width, share * z, 0.0), axis=0)
        top = new
    found = top + tl.log(total)
    tl.store(lse + row + one, found)
    tl.store(negative_entropy + row + one, mean / total - found)
    tl.store(choice + row + one, best.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["teacher_lse", "negative_entropy", "label", "weight"])
def _losses(
    logits, stride, teacher, teacher_stride, teacher_lse, negative_entropy, teacher_choice, label, weight,
    losses, choices, width, mixing,
    KIND: tl.constexpr, FIXED: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(label + row).to(tl.int64)
    source, truth = logits + row * stride, teacher + number * teacher_stride
    shift = tl.load(teacher_lse + number)
    right = tl.load(teacher_choice + number)
    one = tl.arange(0, 1)
    top = tl.full([1], -float("inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    cross = tl.zeros([1], dtype=tl.float32)
    best = tl.zeros([1], dtype=tl.int32)
    for start in range(0, width, BLOCK):
        z, cols = _row(source, start, width, BLOCK)
        here = tl.max(z, axis=0)
        best = tl.where(here > top, start + tl.argmax(z, axis=0), best)
        new = tl.maximum(top, here)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(z - new), axis=0)
        if KIND == CROSS_ENTROPY:
            cross += tl.sum(tl.where(cols == right, z, 0.0), axis=0)
        else:
            t, _ = _row(truth, start, width, BLOCK)
            cross += tl.sum(tl.where(cols < width, tl.exp(t - shift) * z, 0.0), axis=0)
        top = new
    lse = top + tl.log(total)
    loss = lse - cross
    mean = tl.zeros([1], dtype=tl.float32)
    share = tl.zeros([1], dtype=tl.float32)
    if KIND != CROSS_ENTROPY:
        loss += tl.load(negative_entropy + number)
    if KIND == ACCEPTANCE:
        overlap = tl.zeros([1], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            z, _ = _row(source, start, width, BLOCK)
            t, _ = _row(truth, start, width, BLOCK)
            q, p = tl.exp(z - lse), tl.exp(t - shift)
            overlap += tl.sum(tl.minimum(q, p), axis=0)
            mean += tl.sum(tl.where(q < p, q, 0.0), axis=0)
        share += mixing
        if not FIXED:
            share = 1.0 - tl.exp(-mixing * overlap)
        loss = (1.0 - share) * loss + share * (1.0 - overlap)
    tl.store(losses + row + one, loss)
    tl.store(choices + row + one, best.to(tl.int64))
    if WITH_GRADIENT:
        factor = tl.load(weight + row)
        for start in range(0, width, BLOCK):
            z, cols = _row(source, start, width, BLOCK)
            q = tl.exp(z - lse)
            if KIND == CROSS_ENTROPY:
                grad = q - tl.where(cols == right, 1.0, 0.0)
            else:
                t, _ = _row(truth, start, width, BLOCK)
                p = tl.exp(t - shift)
                grad = q - p
                if KIND == ACCEPTANCE:
                    grad = (1.0 - share) * grad + share * q * (mean - tl.where(q < p, 1.0, 0.0))
            tl.store(source + cols, (factor * grad).to(logits.dtype.element_ty), mask=cols < width)
