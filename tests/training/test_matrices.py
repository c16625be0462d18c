"""Weight gradients that are gathered over steps, against autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3_core.training import matrices
from eagle3_core.training.matrices import Matrix, Slots, cast, cast_halves, linear, project

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")


def _parameters(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def test_products_side_by_side_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    product = matrices.product
    monkeypatch.setattr(matrices, "product", lambda g, x, total: sizes.append(len(g)) or product(g, x, total))
    weight, first, second, apart = _parameters((3, 4), (5, 4), (2, 4), (6, 4))
    matrix = Matrix((3, 4), 13, torch.float32, CPU)
    used = cast(matrix, torch.float32, weight)
    total = torch.zeros(())
    for states, in_slot in ((first, True), (second, True), (apart, False)):
        inputs = matrix.inputs.take(len(states)).copy_(states.detach()) if in_slot else states
        total = total + ((linear(inputs, used, matrix) + 0).sin() * len(states)).sum()
    total.backward()
    assert sorted(sizes) == [6, 7]
    plain = sum(((states @ weight.T).sin() * len(states)).sum() for states in (first, second, apart))
    (wanted,) = torch.autograd.grad(plain, weight)
    torch.testing.assert_close(weight.grad, wanted)


def test_a_row_more_than_planned_gets_memory_of_its_own() -> None:
    slots = Slots(4, 2, torch.float32, CPU)
    first, second, third = slots.take(2), slots.take(2), slots.take(1)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() != third.untyped_storage().data_ptr()


@pytest.mark.parametrize("queries", [None, [1, 4, 5]])
def test_projections_equal_separate_products(queries: list[int] | None) -> None:
    first, second, norm, inputs, tokens = _parameters((6, 8), (4, 8), (4,), (7, 4), (7, 4))
    chosen = None if queries is None else torch.tensor(queries)
    token, state = Matrix((10, 4), 0, torch.float32, CPU), Matrix((10, 4), 7, torch.float32, CPU)
    left, right = cast_halves(token, state, torch.float32, norm, first, second)
    found = project(inputs, chosen, right, state, 6)
    rows = slice(None) if chosen is None else chosen
    shared = linear(tokens.detach(), left, token)
    total = found[0] + shared[rows, :6], found[1] + shared[:, 6:]
    sum((part + 0).sin().sum() for part in total).backward()
    whole = torch.cat([tokens.detach() * norm, inputs], dim=1)
    plain = (whole[rows] @ first.T).sin().sum() + (whole @ second.T).sin().sum()
    for tensor, wanted in zip(
        (first, second, norm, inputs), torch.autograd.grad(plain, (first, second, norm, inputs)), strict=True
    ):
        torch.testing.assert_close(tensor.grad, wanted)
