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

import numpy as np
import torch
from torch import Tensor

from eagle3_core.sections import LossConfig
from eagle3_core.training.losses import row_losses
from eagle3_core.training.rows import RowPlan

CHUNK_ELEMENTS = 1 << 20
"""Teacher logits (labels x D) of a chunk; the draft's logits are at most T times as many."""


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
        compute = head.to(teacher.head.dtype)
        sums = torch.zeros(len(hidden), dtype=torch.float32, device=head.device)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if needs_head else None
        grads = [torch.zeros_like(states) for states in hidden]
        choices = [torch.zeros(len(states), dtype=torch.int64, device=head.device) for states in hidden]
        normal = teacher.normalise(final_states)
        for start, end, parts in _chunks(plan, len(teacher.head)):
            log_target = torch.log_softmax((normal[start:end] @ teacher.head.T).float(), dim=-1)
            target = log_target.exp()
            negative_entropy = (target * log_target).sum(-1)
            for step, (first, last) in enumerate(parts):
                if first == last:
                    continue
                index = torch.from_numpy(plan.steps[step].label[first:last] - start).to(head.device)
                states = hidden[step][first:last].to(compute.dtype)
                wanted = target if len(index) == len(target) else target[index]
                logits = (states @ compute.T).float()
                choices[step][first:last] = logits.argmax(-1)
                losses, grad = row_losses(kind, logits, wanted, negative_entropy[index], needs_gradient)
                sums[step] += losses.sum()
                if grad is None:
                    continue
                grad = grad.mul_(weights[step]).to(compute.dtype)
                grads[step][first:last] = grad @ compute
                if grad_head is not None:
                    grad_head += grad.T @ states
        ctx.save_for_backward(*([grad_head] if grad_head is not None else []), *grads)
        ctx.has_head = grad_head is not None
        ctx.mark_non_differentiable(sums, *choices)
        factors = torch.tensor(weights, dtype=torch.float32, device=head.device)
        return (sums * factors).sum(), sums, *choices

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        saved = [tensor * grad_loss for tensor in ctx.saved_tensors]
        grad_head = saved.pop(0) if ctx.has_head else None
        return None, grad_head, None, None, None, None, *saved


def _chunks(plan: RowPlan, vocabulary: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Label ranges [start, end), and for each step the range of its loss rows that read them."""
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    bounds = np.append(np.arange(0, len(plan.labels), size), len(plan.labels))
    cuts = [np.searchsorted(step.label, bounds).tolist() for step in plan.steps]
    return [
        (int(bounds[i]), int(bounds[i + 1]), [(cut[i], cut[i + 1]) for cut in cuts])
        for i in range(len(bounds) - 1)
    ]
