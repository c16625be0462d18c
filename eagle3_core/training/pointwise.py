"""What stands between the matrix products of a layer: norms, gating, rotation, choice of rows.

Legend: N rows, H hidden size, I intermediate size, h heads, d head size.

Each operation has its gradient in closed form and two implementations of one mathematics: eager torch, and on
CUDA a Triton kernel of `kernels`. The residual stream and what is summed stay in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm(
    states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """RMSNorm, [N, H] to [N, H].

    Args:
        states: fp32 or the compute dtype.
        weight: [H] fp32.
        dtype: of the result.
        out: where to write it.
    """
    return _AddNorm.apply(states, None, weight, eps, dtype, out)[1]


def add_norm(
    states: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The residual stream after a block, and its RMSNorm.

    Args:
        states: [N, H] fp32.
        delta: [N, H], what the block adds.
        weight, eps, dtype, out: as in `rms_norm`.

    Returns:
        states + delta in fp32, and its norm in `dtype`.
    """
    total, normal = _AddNorm.apply(states, delta, weight, eps, dtype, out)
    return total, normal


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        out = torch.empty(states.shape, dtype=dtype, device=states.device) if out is None else out
        if states.is_cuda:
            from eagle3_core.training.kernels import norm

            total, rate = norm.forward(states, delta, weight, eps, out)
        else:
            total, rate = _norm_forward(states, delta, weight, eps, out)
        # Autograd may not see `total` as both an output and a saved input, nor slots: see `matrices`.
        ctx.total, ctx.rate, ctx.weight = total.detach(), rate, weight.detach()
        ctx.delta_slot = None if delta is None else delta.detach()
        ctx.dtype = states.dtype
        return (None if delta is None else total), out

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor | None, grad_normal: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_normal is None:
            return grad_total, _like(grad_total, ctx.delta_slot), None, None, None, None
        if grad_normal.is_cuda:
            from eagle3_core.training.kernels import norm

            grad, grad_weight = norm.backward(
                grad_total, grad_normal, ctx.total, ctx.rate, ctx.weight, ctx.delta_slot
            )
            delta = ctx.delta_slot
        else:
            grad, grad_weight = _norm_backward(grad_total, grad_normal, ctx.total, ctx.rate, ctx.weight)
            delta = _like(grad, ctx.delta_slot)
        return grad.to(ctx.dtype), delta, grad_weight, None, None, None


def _like(gradient: Tensor | None, slot: Tensor | None) -> Tensor | None:
    return None if gradient is None or slot is None else slot.copy_(gradient)


def _norm_forward(
    states: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> tuple[Tensor, Tensor]:
    total = states if delta is None else states + delta
    wide = total.float()
    rate = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out.copy_(wide * rate * weight)
    return total, rate.squeeze(-1)


def _norm_backward(
    grad_total: Tensor | None, grad_normal: Tensor, total: Tensor, rate: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    unit = total.float() * rate.unsqueeze(-1)
    wide = grad_normal.float()
    along = wide * weight
    grad = rate.unsqueeze(-1) * (along - unit * (along * unit).mean(-1, keepdim=True))
    grad_weight = (wide * unit).sum(0)
    return grad if grad_total is None else grad.add_(grad_total), grad_weight


def gated(both: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, [N, I].

    Args:
        both: [N, 2 I], gate beside up; overwritten by its gradient in the backward pass.
        out: where to write the result.
    """
    return _Gated.apply(both, out)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, out: Tensor | None) -> Tensor:
        width = both.shape[1] // 2
        out = both.new_empty(len(both), width) if out is None else out
        ctx.both = both.detach()
        if both.is_cuda:
            from eagle3_core.training.kernels import gate

            gate.forward(both, out)
        else:
            up = both[:, width:].float()
            out.copy_(torch.nn.functional.silu(both[:, :width].float()) * up)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        both = ctx.both
        if both.is_cuda:
            from eagle3_core.training.kernels import gate

            gate.backward(both, gradient)
            return both, None
        width = both.shape[1] // 2
        left, right, wide = both[:, :width].float(), both[:, width:].float(), gradient.float()
        chance = torch.sigmoid(left)
        grad_gate = wide * right * chance * (1 + left * (1 - chance))
        both[:, width:] = (
            wide * left * chance
        )  # fp32 halves are views of `both`: the gate's gradient is first
        both[:, :width] = grad_gate
        return both, None


def take(states: Tensor, rows: Tensor | None) -> Tensor:
    """The given rows, each at most once; None takes all."""
    return states if rows is None else _Take.apply(states, rows)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.count, *gradient.shape[1:])
        return whole.index_copy_(0, rows, gradient), None
