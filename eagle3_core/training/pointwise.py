"""What stands between the matrix products of a layer: norms, gating, rotation, choice of rows.

Legend: N rows, H hidden size, I intermediate size, h heads, d head size.

Each operation has its gradient in closed form and two implementations of one mathematics: eager torch, and on
CUDA a Triton kernel of `kernels`. The residual stream and what is summed stay in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """Which rows of a step go where; all int64, None for all rows in order.

    Attributes:
        loss: [M], rows whose norm is wanted; `loss_at`, [N], where each row's norm goes, -1 for nowhere.
        after: [L], rows of the residual stream that the next step computes; `after_at` likewise.
    """

    loss: Tensor | None = None
    loss_at: Tensor | None = None
    after: Tensor | None = None
    after_at: Tensor | None = None


EVERYWHERE = Routes()


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
    return carried_norm(states, weight, eps, dtype, out)[1]


def carried_norm(
    states: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The states and their norm, as in `rms_norm`; going on with the states returned sums gradients once."""
    same, normal = _AddNorm.apply(states, None, weight, eps, dtype, out, EVERYWHERE)
    return same, normal


def add_norm(
    states: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    out: Tensor | None = None,
    routes: Routes = EVERYWHERE,
) -> tuple[Tensor, Tensor]:
    """The residual stream after a block, and its RMSNorm.

    Args:
        states: [N, H] fp32.
        delta: [N, H], what the block adds.
        weight, eps, dtype, out: as in `rms_norm`.
        routes: which rows of both results are wanted.

    Returns:
        states + delta in fp32, [N, H] or [L, H], and its norm in `dtype`, [N, H] or [M, H].
    """
    total, normal = _AddNorm.apply(states, delta, weight, eps, dtype, out, routes)
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
        routes: Routes,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        if out is None:
            rows = len(states) if routes.loss is None else len(routes.loss)
            out = torch.empty(rows, states.shape[1], dtype=dtype, device=states.device)
        if states.is_cuda:
            from eagle3_core.training.kernels import norm

            total, rate, after = norm.forward(states, delta, weight, eps, out, routes)
        else:
            total, rate, after = _norm_forward(states, delta, weight, eps, out, routes)
        # Not saved by autograd, which takes a write to one slot for a write to all: see `matrices`.
        ctx.total, ctx.rate, ctx.weight = total.detach(), rate, weight.detach()
        ctx.delta_slot = None if delta is None else delta.detach()
        ctx.dtype, ctx.routes = states.dtype, routes
        return (states.view_as(states) if delta is None else after), out

    @staticmethod
    def backward(
        ctx: Any, grad_after: Tensor | None, grad_normal: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if ctx.total.is_cuda:
            from eagle3_core.training.kernels import norm

            grad, grad_weight = norm.backward(
                grad_after, grad_normal, ctx.total, ctx.rate, ctx.weight, ctx.delta_slot, ctx.routes
            )
        else:
            grad, grad_weight = _norm_backward(
                grad_after, grad_normal, ctx.total, ctx.rate, ctx.weight, ctx.delta_slot, ctx.routes
            )
        return grad.to(ctx.dtype), ctx.delta_slot, grad_weight, None, None, None, None


def _norm_forward(
    states: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor, routes: Routes
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, 1 / rms of its rows, and its rows that go on; the norm goes to `out`."""
    total = states if delta is None else states + delta
    wide = total.float()
    rate = torch.rsqrt(wide.square().mean(-1) + eps)
    normal = wide * rate.unsqueeze(-1) * weight
    out.copy_(normal if routes.loss is None else normal.index_select(0, routes.loss))
    return total, rate, total if routes.after is None else total.index_select(0, routes.after)


def _norm_backward(
    grad_after: Tensor | None,
    grad_normal: Tensor | None,
    total: Tensor,
    rate: Tensor,
    weight: Tensor,
    grad_delta: Tensor | None,
    routes: Routes,
) -> tuple[Tensor, Tensor]:
    """Gradients by the states, which are also written to `grad_delta`, and by the weight."""
    grad = torch.zeros(total.shape, dtype=torch.float32, device=total.device)
    grad_weight = torch.zeros_like(weight)
    if grad_normal is not None:
        wide = grad_normal.float()
        if routes.loss is not None:
            wide = torch.zeros_like(grad).index_copy_(0, routes.loss, wide)
        unit, along = total.float() * rate.unsqueeze(-1), wide * weight
        grad += rate.unsqueeze(-1) * (along - unit * (along * unit).mean(-1, keepdim=True))
        grad_weight = (wide * unit).sum(0)
    if grad_after is not None:
        if routes.after is None:
            grad += grad_after
        else:
            grad.index_add_(0, routes.after, grad_after)
    if grad_delta is not None:
        grad_delta.copy_(grad)
    return grad, grad_weight


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
