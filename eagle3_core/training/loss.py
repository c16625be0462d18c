"""The loss of a pack, LM head included, without logits of a whole pack.

Legend: n labels (rows that a loss term reads), M_k loss rows of step k, T steps, H hidden size, D draft
vocabulary.

The loss of a pack is sum_k decay^k * S_k / n_k, with S_k the sum over the loss rows of step k of one of the
`losses`, by default KL(p || q): p is the softmax of the target's logits over the draft vocabulary, q the
draft's distribution. Each has its gradient by the draft's logits in closed form, so both products with the LM
head and the gradient are computed in one pass over chunks of labels, in the forward pass: the teacher's
logits of a label are computed once and serve all steps, and fp32 logits exist for one chunk only. The draft's
greedy choices fall out of the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_core.sections import LossConfig
from eagle3_core.training.chunks import chunk_rows
from eagle3_core.training.losses import row_losses
from eagle3_core.training.matrices import product
from eagle3_core.training.row_index import send_arrays
from eagle3_core.training.rows import RowPlan

CHUNK_ELEMENTS = 1 << 20
"""Logits of a chunk on the CPU: few enough for its caches."""
CHUNK_BYTES = 1 << 29
"""The draft's logits of a chunk on a GPU: enough rows for products at full speed."""


@dataclass(frozen=True)
class Teacher:
    """The target's final norm and the LM head's rows of the draft vocabulary.

    Attributes:
        norm: [H] fp32.
        eps: of the norm.
        head: [D, H] in the compute dtype.
    """

    norm: Tensor
    eps: float
    head: Tensor

    def normalise(self, states: Tensor) -> Tensor:
        """RMSNorm in fp32, [n, H] to [n, H] in the compute dtype."""
        wide = states.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.norm).to(self.head.dtype)


@dataclass(frozen=True)
class LossParts:
    """A loss and what it was made of.

    Attributes:
        loss: scalar with a gradient: sum_k decay^k * S_k / n_k over the weights given.
        step_sums: [T] fp32, S_k.
        counts: loss rows of each step (n_k).
        choices: for each step the draft's greedy choices, [M_k] int64 draft ids.
    """

    loss: Tensor
    step_sums: Tensor
    counts: list[int]
    choices: tuple[Tensor, ...]


def step_weights(counts: Sequence[int], decay: float) -> list[float]:
    """decay^k / n_k, 0 for a step without loss rows. `counts` are those of the whole optimizer step."""
    return [decay**step / count if count else 0.0 for step, count in enumerate(counts)]


def pack_loss(
    hidden: Sequence[Tensor],
    head: Tensor,
    final_states: Tensor,
    teacher: Teacher,
    plan: RowPlan,
    weights: Sequence[float],
    kind: LossConfig | None = None,
) -> LossParts:
    """The loss of a pack.

    Args:
        hidden: for each step the normalised hidden states of its loss rows, [M_k, H].
        head: the draft's LM head, [D, H]; gets a gradient if it requires one.
        final_states: [n, H], the teacher's states of the labels.
        teacher: the target's norm and head.
        plan: which label each loss row is compared with.
        weights: factor of S_k in the loss, from `step_weights`.
        kind: the loss of a row; None is KL.
    """
    row_loss = kind or LossConfig()
    loss, sums, *choices = _ChunkedLoss.apply(
        row_loss, head, final_states, teacher, plan, tuple(weights), *hidden
    )
    return LossParts(loss, sums, plan.counts, tuple(choices))


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradients in one pass; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: LossConfig,
        head: Tensor,
        final_states: Tensor,
        teacher: Teacher,
        plan: RowPlan,
        weights: tuple[float, ...],
        *hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        needs_head = ctx.needs_input_grad[1]
        needs_gradient = needs_head or any(ctx.needs_input_grad[6:])
        compute, device = head.to(teacher.head.dtype), head.device
        rows = chunk_rows(plan, _max_rows(compute))
        order, inverse, label, step = send_arrays((rows.order, rows.inverse, rows.label, rows.step), device)
        factors = torch.tensor(weights, dtype=torch.float32).to(device, non_blocking=True)
        states = torch.cat([part.to(compute.dtype) for part in hidden]).index_select(0, order)
        normal, row_weights = teacher.normalise(final_states), factors[step]
        losses = torch.empty(len(states), dtype=torch.float32, device=device)
        choices = torch.empty(len(states), dtype=torch.int64, device=device)
        grads = torch.empty_like(states) if needs_gradient else None
        grad_head: Tensor | None = None
        for chunk in rows.chunks:
            part = slice(chunk.first, chunk.last)
            wanted = normal[chunk.start : chunk.end] @ teacher.head.T
            losses[part], choices[part], grad = chunk_losses(
                kind, states[part] @ compute.T, wanted, label[part], row_weights[part], needs_gradient
            )
            if grad is not None and grads is not None:
                torch.mm(grad, compute, out=grads[part])
                if needs_head:
                    grad_head = product(grad, states[part], grad_head)
        sums = torch.stack([x.sum() for x in losses.index_select(0, inverse).split(plan.counts)])
        found = choices.index_select(0, inverse).split(plan.counts)
        if needs_head and grad_head is None:
            grad_head = torch.zeros(head.shape, dtype=torch.float32, device=device)
        ctx.grads, ctx.grad_head, ctx.counts = grads, grad_head, plan.counts
        ctx.inverse, ctx.dtypes = inverse, [part.dtype for part in hidden]
        ctx.mark_non_differentiable(sums, *found)
        return (sums * factors).sum(), sums, *found

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_head = None if ctx.grad_head is None else ctx.grad_head * grad_loss
        parts = (ctx.grads * grad_loss).index_select(0, ctx.inverse).split(ctx.counts)
        hidden = [part.to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True)]
        return None, grad_head, None, None, None, None, *hidden


def chunk_losses(
    kind: LossConfig, logits: Tensor, wanted: Tensor, label: Tensor, weight: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses of a chunk of rows, their greedy choices, and weight * gradient by the logits.

    Args:
        kind: the loss of a row.
        logits: [m, D] of the draft; overwritten.
        wanted: [n, D], the teacher's logits.
        label: [m], row of `wanted` that each is compared with.
        weight: [m] fp32.
        with_gradient: whether the gradient is wanted.

    Returns:
        [m] fp32, [m] int64, and [m, D] in the dtype of the logits.
    """
    if logits.is_cuda:
        from eagle3_core.training.kernels import rows_loss

        sums = rows_loss.teacher_sums(wanted)
        losses, choices = rows_loss.losses_of_rows(kind, logits, wanted, sums, label, weight, with_gradient)
        return losses, choices, logits if with_gradient else None
    choices = logits.argmax(-1)
    log_target = torch.log_softmax(wanted.float(), dim=-1)
    target = log_target.exp()
    negative_entropy = torch.linalg.vecdot(target, log_target)
    wide = logits.float()
    losses, grad = row_losses(kind, wide, target[label], negative_entropy[label], with_gradient)
    return losses, choices, None if grad is None else grad.mul_(weight.unsqueeze(-1)).to(logits.dtype)


def _max_rows(head: Tensor) -> int:
    """Rows of a chunk."""
    if head.is_cuda:
        return CHUNK_BYTES // (head.element_size() * len(head))
    return CHUNK_ELEMENTS // len(head)
