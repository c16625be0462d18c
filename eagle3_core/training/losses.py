"""The losses of a row and their gradients by the draft's logits, for one chunk of rows.

Legend: m rows of a chunk, D draft vocabulary; p the target's distribution over the draft vocabulary, z the
draft's logits, q = softmax(z).

    kind            loss                                  gradient by z
    kl              sum p log p - p.z + logsumexp(z)      q - p
    cross_entropy   logsumexp(z) - z_c, c = argmax p      q - onehot(c)
    acceptance      (1 - w) KL + w TV                     (1 - w) (q - p) + w q (q.b - b), b = [q < p]

With rejection sampling the target accepts a token drawn from q with probability sum_v min(p_v, q_v), which is
1 - TV(p, q) (Leviathan et al. 2023, arXiv 2211.17192). TV has hardly a gradient where p and q are far apart,
KL has one; w = 1 - exp(-eta sum min(p, q)), not differentiated, goes from the one to the other: the hybrid of
"LK Losses" (Samarin et al., arXiv 2602.23881), which speculators calls `lk_hybrid`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_core.sections import LossConfig


def row_losses(
    loss: LossConfig, logits: Tensor, target: Tensor, negative_entropy: Tensor, with_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Losses of a chunk of rows, and their gradients.

    Args:
        loss: which loss, and its weights.
        logits: [m, D] of the draft, fp32 (or fp64); overwritten.
        target: [m, D], p, in the same dtype.
        negative_entropy: [m], sum p log p.
        with_gradient: whether the gradient is wanted.

    Returns:
        [m] losses, and [m, D] gradients of each row's loss by its logits.
    """
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    if loss.kind == "cross_entropy":
        return _cross_entropy(logits, target, total, with_gradient)
    divergence = negative_entropy - torch.linalg.vecdot(target, logits) + total.squeeze(-1)
    if loss.kind == "acceptance":
        return _acceptance(loss, logits, target, total, divergence, with_gradient)
    return divergence, logits.sub_(total).exp_().sub_(target) if with_gradient else None


def _cross_entropy(
    logits: Tensor, target: Tensor, total: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    choice = target.argmax(-1, keepdim=True)
    losses = (total - logits.gather(-1, choice)).squeeze(-1)
    if not with_gradient:
        return losses, None
    draft = logits.sub_(total).exp_()
    return losses, draft.scatter_add_(-1, choice, torch.full_like(total, -1.0))


def _acceptance(
    loss: LossConfig, logits: Tensor, target: Tensor, total: Tensor, divergence: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    draft = logits.sub_(total).exp_()
    overlap = torch.minimum(draft, target).sum(-1)
    if loss.acceptance_eta is None:
        weight = torch.full_like(overlap, loss.acceptance_weight)
    else:
        weight = 1.0 - torch.exp(-loss.acceptance_eta * overlap)
    losses = (1.0 - weight) * divergence + weight * (1.0 - overlap)
    if not with_gradient:
        return losses, None
    below = (draft < target).to(draft.dtype)
    mean = torch.linalg.vecdot(draft, below).unsqueeze(-1)
    share = weight.unsqueeze(-1)
    towards = below.neg_().add_(mean).mul_(draft).mul_(share)
    return losses, draft.sub_(target).mul_(1.0 - share).add_(towards)
