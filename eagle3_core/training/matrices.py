"""Matrix products of an unrolled forward: weights cast once, each weight gradient one product over all steps.

Legend: N rows of a product, I columns in, O columns out.

A TTT step uses every matrix once, so seven steps use it seven times. Its gradient, the sum of dY^T X over the
steps, is one product over the rows of all steps if these lie side by side. `Slots` hands out such rows:
who makes an input or a gradient writes it where the last product will read it. What lies elsewhere is copied
or, for inputs, multiplied on its own; the result is the same.

The output of a product and the gradient by it share a slot: once the gradient is known, the output is not
needed any more. So operations that take a product may not save it for their own backward pass, and tensors in
slots are kept as attributes of the autograd context: torch's check of saved tensors takes a write to one slot
for a write to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Slots:
    """Rows side by side in one tensor, handed out in order.

    Args:
        rows: of all steps; 0 hands out separate tensors (nothing will be differentiated).
        width: columns.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = (rows, width), dtype, device
        self._buffer: Tensor | None = None
        self._next = 0

    def take(self, rows: int) -> Tensor:
        """[rows, width], not initialised."""
        if self._next + rows > self._shape[0]:
            return torch.empty(rows, self._shape[1], dtype=self._dtype, device=self._device)
        if self._buffer is None:
            self._buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._next += rows
        return self._buffer[self._next - rows : self._next]


class Matrix:
    """A weight matrix in the compute dtype, and what its gradient is made of.

    Args:
        shape: [O, I].
        rows: products' rows in all steps, 0 without gradients.

    Attributes:
        inputs: slots for what it is multiplied with, [N, I].
        outputs: slots for products, and later for the gradients by them, [N, O].
    """

    def __init__(
        self,
        shape: Sequence[int],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        in_rows: int | None = None,
    ) -> None:
        self.shape = (shape[0], shape[1])
        self.inputs = Slots(rows if in_rows is None else in_rows, shape[1], dtype, device)
        self.outputs = Slots(rows, shape[0], dtype, device)
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._partial: list[tuple[slice, Tensor, Tensor]] = []

    def record(self, inputs: Tensor, gradient: Tensor, rows: slice | None = None) -> None:
        """Remember a product's input and the gradient by its output, or by the output of some weight rows."""
        if not len(inputs):
            return
        if rows is None:
            self._parts.append((inputs, gradient))
        else:
            self._partial.append((rows, inputs, gradient))

    def gradient(self) -> Tensor | None:
        """[O, I] in fp32, the sum over all products; None if there were none."""
        total: Tensor | None = None
        for inputs, gradient in _joined(self._parts):
            total = product(gradient, inputs, total)
        for rows, inputs, gradient in self._partial:
            if total is None:
                total = torch.zeros(self.shape, dtype=torch.float32, device=inputs.device)
            total[rows] = product(gradient, inputs, total[rows])
        self._parts, self._partial = [], []
        return total


def linear(inputs: Tensor, weight: Tensor, matrix: Matrix) -> Tensor:
    """inputs @ weight^T, [N, O].

    Args:
        inputs: [N, I] in the compute dtype, best in a slot of `matrix.inputs`.
        weight: [O, I], from `cast`; its gradient goes to `matrix`.
        matrix: of the weight.
    """
    return _Linear.apply(inputs, weight, matrix)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, matrix: Matrix) -> Tensor:
        ctx.set_materialize_grads(False)
        slot = matrix.outputs.take(len(inputs))
        torch.mm(inputs, weight.T, out=slot)
        ctx.inputs, ctx.weight, ctx.matrix, ctx.slot = inputs.detach(), weight.detach(), matrix, slot.detach()
        return slot

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        if gradient is None:
            return None, None, None
        gradient = settled(gradient, ctx.slot)
        ctx.matrix.record(ctx.inputs, gradient)
        wanted = ctx.needs_input_grad[0]
        return torch.mm(gradient, ctx.weight) if wanted else None, None, None


def project(
    inputs: Tensor, queries: Tensor | None, weight: Tensor, matrix: Matrix, split: int
) -> tuple[Tensor, Tensor]:
    """Projections of queries, [N, split], beside those of keys and values, [C, O - split].

    Args:
        inputs: [C, I] in the compute dtype, best in a slot of `matrix.inputs`.
        queries: [N], rows whose queries are wanted; None for all, in one product.
        weight: [O, I], that of the queries above that of keys and values; its gradient goes to `matrix`.
        matrix: of the weight.
        split: rows of the queries' weight.
    """
    first, second = _Project.apply(inputs, queries, weight, matrix, split)
    return first, second


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, queries: Tensor | None, weight: Tensor, matrix: Matrix, split: int
    ) -> tuple[Tensor, Tensor]:
        ctx.inputs, ctx.queries, ctx.weight = inputs.detach(), queries, weight.detach()
        ctx.matrix, ctx.split = matrix, split
        if queries is not None:
            ctx.chosen = inputs.index_select(0, queries)
            return ctx.chosen @ weight[:split].T, inputs @ weight[split:].T
        slot = matrix.outputs.take(len(inputs))
        torch.mm(inputs, weight.T, out=slot)
        ctx.slot = slot.detach()
        return slot[:, :split], slot[:, split:]

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor | None, ...]:
        weight, matrix, split = ctx.weight, ctx.matrix, ctx.split
        if ctx.queries is None:
            settled(first, ctx.slot[:, :split])
            settled(second, ctx.slot[:, split:])
            matrix.record(ctx.inputs, ctx.slot)
            grad = ctx.slot @ weight
        else:
            matrix.record(ctx.chosen, first, slice(0, split))
            matrix.record(ctx.inputs, second, slice(split, len(weight)))
            grad = (second @ weight[split:]).index_add_(0, ctx.queries, first @ weight[:split])
        return grad, None, None, None, None


def settled(tensor: Tensor, slot: Tensor) -> Tensor:
    """The tensor in the slot: copied unless it was made there."""
    if tensor.data_ptr() == slot.data_ptr() and tensor.dtype == slot.dtype:
        return slot
    return slot.copy_(tensor.view(slot.shape))


def cast(matrix: Matrix, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
    """The parameters one above the other, [O, I] in `dtype`; gets the gradient that `matrix` has gathered."""
    return _Cast.apply(matrix, dtype, *parameters)


class _Cast(torch.autograd.Function):
    """Runs last in the backward pass, because every product depends on it."""

    @staticmethod
    def forward(ctx: Any, matrix: Matrix, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.matrix, ctx.sizes = matrix, [len(parameter) for parameter in parameters]
        return _stacked(parameters, dtype)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        gradient = ctx.matrix.gradient()
        parts = [None] * len(ctx.sizes) if gradient is None else gradient.split(ctx.sizes)
        return None, None, *parts


def cast_halves(
    embedded: Matrix, state: Matrix, dtype: torch.dtype, norm: Tensor, *parameters: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights [O, 2 H] that read a normalised embedding beside a normalised state, as two matrices [O, H].

    The norm's weights are multiplied into the embeddings' half, so that its input is the same at every step
    and needs no gradient.

    Args:
        embedded: of the first half, which is multiplied with embeddings normalised to a mean square of 1.
        state: of the second half.
        norm: [H], weights of the embeddings' norm.
        parameters: [O_i, 2 H], one above the other.
    """
    return _CastHalves.apply(embedded, state, dtype, norm, *parameters)


class _CastHalves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, embedded: Matrix, state: Matrix, dtype: torch.dtype, norm: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.embedded, ctx.state, ctx.parameters, ctx.norm = embedded, state, parameters, norm
        width = len(norm)
        left = _stacked([parameter[:, :width] * norm for parameter in parameters], dtype)
        return left, _stacked([parameter[:, width:] for parameter in parameters], dtype)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        left, right = ctx.embedded.gradient(), ctx.state.gradient()
        if left is None or right is None:
            return None, None, None, *[None] * (1 + len(ctx.parameters))
        width = len(ctx.norm)
        whole = torch.empty(len(left), 2 * width, dtype=left.dtype, device=left.device)
        torch.mul(left, ctx.norm, out=whole[:, :width])
        whole[:, width:] = right
        sizes = [len(parameter) for parameter in ctx.parameters]
        norm = torch.zeros_like(ctx.norm)
        for parameter, part in zip(ctx.parameters, left.split(sizes), strict=True):
            norm += (part * parameter[:, :width]).sum(0)
        return None, None, None, norm, *whole.split(sizes)


def _stacked(parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if len(parameters) == 1:
        return parameters[0].to(dtype, copy=True)
    rows = sum(len(parameter) for parameter in parameters)
    out = torch.empty(rows, parameters[0].shape[1], dtype=dtype, device=parameters[0].device)
    for part, parameter in zip(out.split([len(p) for p in parameters]), parameters, strict=True):
        part.copy_(parameter)
    return out


def _joined(parts: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Parts whose inputs and gradients both lie side by side, as one."""
    groups: list[tuple[Tensor, Tensor]] = []
    for part in sorted(parts, key=lambda part: part[1].data_ptr()):
        if groups and all(_adjacent(a, b) for a, b in zip(groups[-1], part, strict=True)):
            groups[-1] = tuple(_widened(a, b) for a, b in zip(groups[-1], part, strict=True))  # type: ignore[assignment]
        else:
            groups.append(part)
    return groups


def _adjacent(first: Tensor, second: Tensor) -> bool:
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same and first.storage_offset() + first.numel() == second.storage_offset()


def _widened(first: Tensor, second: Tensor) -> Tensor:
    return first.as_strided((len(first) + len(second), first.shape[1]), first.stride())


def product(gradient: Tensor, inputs: Tensor, total: Tensor | None) -> Tensor:
    """total + gradient^T @ inputs in fp32, [O, I] from [N, O] and [N, I]; `total` may be overwritten."""
    if gradient.dtype == torch.float32:
        return gradient.T @ inputs if total is None else total.addmm_(gradient.T, inputs)
    if gradient.is_cuda:
        if total is None:
            return torch.mm(gradient.T, inputs, out_dtype=torch.float32)
        return torch.addmm(total, gradient.T, inputs, out_dtype=torch.float32)
    found = (gradient.T @ inputs).float()
    return found if total is None else total.add_(found)
