"""From projections to rotated queries, and to keys and values in a layer's memory.

Legend: N query rows, C rows whose keys and values are made, R rows of the pack, T TTT steps, h query heads,
g key/value heads, d head size.

The first layer projects [embedding, state]. A token's embedding is the same wherever it is read: row t at
step k reads token t + k + 1, as row t + k did at step 0. So its half of the projection is made once for each
token (`TokenPart`), and step k adds to its own half the rows that lie k further on. The gradient of the
shared half is summed over the steps in fp32 and multiplied once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3_core.training.matrices import Matrix


class BlockMemory:
    """Keys and values of one layer, by TTT step and row of the pack, with their gradients.

    Block 0 holds every row; later blocks only those that their step computes.

    Attributes:
        keys, values: [T, R, g, d] in the compute dtype.
        grad_keys, grad_values: [T, R, g, d] fp32, sums over the steps that attended to them.
    """

    def __init__(
        self, steps: int, rows: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (steps, rows, heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self._grads: tuple[Tensor, Tensor] | None = None

    @property
    def grads(self) -> tuple[Tensor, Tensor]:
        """Gradients by keys and by values."""
        if self._grads is None:
            zeros = (torch.zeros_like(x, dtype=torch.float32) for x in (self.keys, self.values))
            self._grads = (next(zeros), next(zeros))
        return self._grads


@dataclass
class Sums:
    """Gradient by a `TokenPart` so far, [S, O] fp32; None before the first step's."""

    total: Tensor | None = None


@dataclass(frozen=True)
class TokenPart:
    """The embeddings' half of a projection, made once.

    Attributes:
        states: [S, O], one row for each token that is read.
        sums: apart from `states`, so that what gathers the gradient does not keep its own result alive.
    """

    states: Tensor
    sums: Sums

    def gradient(self) -> Tensor:
        """[S, O] fp32, to be added to."""
        if self.sums.total is None:
            self.sums.total = torch.zeros_like(self.states, dtype=torch.float32)
        return self.sums.total


def token_part(units: Tensor, weight: Tensor, matrix: Matrix, rows: slice) -> TokenPart:
    """Project normalised embeddings.

    Args:
        units: [S, H], embeddings with a mean square of 1, in the compute dtype.
        weight: [all O, H] with the norm's weights in it, from `matrices.cast_halves`.
        matrix: of the weight.
        rows: those of the weight that are used.
    """
    sums = Sums()
    return TokenPart(_Shared.apply(units, weight, matrix, rows, sums), sums)


class _Shared(torch.autograd.Function):
    """A product whose gradient is gathered by its users in `sums`, not handed through autograd."""

    @staticmethod
    def forward(ctx: Any, units: Tensor, weight: Tensor, matrix: Matrix, rows: slice, sums: Sums) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.units, ctx.matrix, ctx.rows, ctx.sums = units, matrix, rows, sums
        return units @ weight[rows].T

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[None, ...]:
        if ctx.sums.total is not None:
            ctx.matrix.record(ctx.units, ctx.sums.total.to(ctx.units.dtype), ctx.rows)
            ctx.sums.total = None
        return None, None, None, None, None


@dataclass(frozen=True)
class Turn:
    """Rotation of some rows.

    Attributes:
        cos, sin: [P, d] fp32 by position.
        positions: [N] int64.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor


def with_tokens(flat: Tensor, part: TokenPart | None, rows: Tensor | None) -> Tensor:
    """flat + part[rows], [N, O]; for models that need the sum before the rotation."""
    return flat if part is None else _AddRows.apply(flat, part.states, rows, part)


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, states: Tensor, rows: Tensor, part: TokenPart) -> Tensor:
        ctx.rows, ctx.part = rows, part
        return flat + states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.part.gradient().index_add_(0, ctx.rows, gradient.float())
        return gradient, None, None, None


def rotated_queries(
    flat: Tensor,
    part: TokenPart | None,
    rows: Tensor | None,
    turn: Turn,
    places: Tensor | None = None,
    size: int = 0,
) -> Tensor:
    """Queries, [N, h, d], or [size, h, d] with zeros between them.

    Args:
        flat: [N, h * d], their projection without the tokens' part.
        part: the tokens' part, if the layer has one.
        rows: [N], rows of `part` to add.
        turn: their rotation.
        places: [N], where they stand in the result; None for the first N.
        size: rows of the result, if `places` are given.
    """
    return _Queries.apply(flat, None if part is None else part.states, part, rows, turn, places, size)


class _Queries(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        states: Tensor | None,
        part: TokenPart | None,
        rows: Tensor | None,
        turn: Turn,
        places: Tensor | None,
        size: int,
    ) -> Tensor:
        ctx.part, ctx.rows, ctx.turn, ctx.places, ctx.slot = part, rows, turn, places, flat.detach()
        depth = turn.cos.shape[1]
        shape = (flat.shape[1] // depth, depth)
        out = flat.new_empty(len(flat), *shape) if places is None else flat.new_zeros(size, *shape)
        rotate(flat.view(-1, *shape), states, rows, turn, out, places)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        out = ctx.slot.view(-1, *gradient.shape[1:])
        sums = None if ctx.part is None else ctx.part.gradient()
        rotate_back(gradient, ctx.places, ctx.turn, out, sums, ctx.rows)
        return ctx.slot, None, None, None, None, None, None


def store_keys_and_values(
    flat: Tensor,
    part: TokenPart | None,
    rows: Tensor | None,
    turn: Turn,
    memory: BlockMemory,
    step: int,
    places: Tensor | None,
    queries: Tensor,
) -> Tensor:
    """Write rotated keys, and values, to the memory; returns `queries`, whose users now depend on both.

    Args:
        flat: [C, 2 * g * d], projections of keys beside those of values, without the tokens' part.
        part, rows, turn: as in `rotated_queries`, for the C rows.
        memory: of the layer.
        step: block to write.
        places: [C], rows of the pack, or None for all.
        queries: of the same step.
    """
    return _Store.apply(
        flat, None if part is None else part.states, queries, part, rows, turn, memory, step, places
    )


class _Store(torch.autograd.Function):
    """Its backward pass runs after that of every step that attends to the block: they depend on it."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        states: Tensor | None,
        queries: Tensor,
        part: TokenPart | None,
        rows: Tensor | None,
        turn: Turn,
        memory: BlockMemory,
        step: int,
        places: Tensor | None,
    ) -> Tensor:
        ctx.part, ctx.rows, ctx.turn, ctx.slot = part, rows, turn, flat.detach()
        ctx.memory, ctx.step, ctx.places = memory, step, places
        heads, depth = memory.keys.shape[2:]
        keys, values = flat.view(len(flat), 2, heads, depth).unbind(1)
        first = second = None
        if states is not None:
            first, second = states.chunk(2, dim=1)
        rotate(keys, first, rows, turn, memory.keys[step], places)
        rotate(values, second, rows, None, memory.values[step], places)
        return queries.view_as(queries)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        memory = ctx.memory
        heads, depth = memory.keys.shape[2:]
        keys, values = ctx.slot.view(len(ctx.slot), 2, heads, depth).unbind(1)
        first = second = None
        if ctx.part is not None:
            first, second = ctx.part.gradient().chunk(2, dim=1)
        grad_keys, grad_values = (grad[ctx.step] for grad in memory.grads)
        rotate_back(grad_keys, ctx.places, ctx.turn, keys, first, ctx.rows)
        rotate_back(grad_values, ctx.places, None, values, second, ctx.rows)
        return ctx.slot, None, gradient, None, None, None, None, None, None


def rotate(
    heads: Tensor,
    added: Tensor | None,
    rows: Tensor | None,
    turn: Turn | None,
    out: Tensor,
    places: Tensor | None,
) -> None:
    """out[places] = rotation of heads + added[rows].

    Args:
        heads: [N, h, d]; its last two dimensions lie side by side.
        added: [S, h * d] or None.
        rows: [N], rows of `added`.
        turn: None leaves them as they are.
        out: [N or more, h, d].
        places: [N], rows of `out`, or None for the first N in order.
    """
    if heads.is_cuda:
        from eagle3_core.training.kernels import rotary

        rotary.forward(heads, added, rows, turn, out, places)
        return
    if added is not None:
        assert rows is not None
        heads = heads + added.index_select(0, rows).view(heads.shape)
    if turn is not None:
        cos, sin = turn.cos[turn.positions].unsqueeze(1), turn.sin[turn.positions].unsqueeze(1)
        left, right = heads.chunk(2, dim=-1)
        heads = heads * cos + torch.cat([-right, left], dim=-1) * sin
    if places is None:
        out[: len(heads)] = heads
    else:
        out.index_copy_(0, places, heads.to(out.dtype))


def rotate_back(
    gradient: Tensor,
    places: Tensor | None,
    turn: Turn | None,
    out: Tensor,
    sums: Tensor | None,
    rows: Tensor | None,
) -> None:
    """The gradient of `rotate`: by `heads` into `out`, and by `added` onto `sums`.

    Args:
        gradient: [N or more, h, d]; its rows `places`, or the first N, are read.
        places: [N] or None.
        turn: of the forward pass.
        out: [N, h, d], written; may be the memory of `heads`.
        sums: [S, h * d] fp32, added to at `rows`, or None.
        rows: [N].
    """
    if gradient.is_cuda:
        from eagle3_core.training.kernels import rotary

        rotary.backward(gradient, places, turn, out, sums, rows)
        return
    wide = (gradient[: len(out)] if places is None else gradient.index_select(0, places)).float()
    if turn is not None:
        cos, sin = turn.cos[turn.positions].unsqueeze(1), turn.sin[turn.positions].unsqueeze(1)
        along = wide * sin
        left, right = along.chunk(2, dim=-1)
        wide = wide * cos + torch.cat([right, -left], dim=-1)
    out.copy_(wide)
    if sums is not None:
        assert rows is not None
        sums.index_add_(0, rows, wide.flatten(1))
