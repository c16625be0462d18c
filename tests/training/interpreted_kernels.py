"""Runs each Triton kernel of the training step in Triton's interpreter against its eager twin.

A program of its own: `TRITON_INTERPRET=1 python -m tests.training.interpreted_kernels`, as the variable is
read when kernels are defined. Outputs are poisoned with NaN first. Sizes are odd on purpose: no power of two,
grouped heads of three, rows that go nowhere. The interpreter cuts bf16 off where a GPU rounds.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from eagle3_core.sections import LossConfig
from eagle3_core.training import attention, heads, pointwise
from eagle3_core.training.heads import Turn
from eagle3_core.training.kernels import diagonal, gate, norm, rotary, rows_loss
from eagle3_core.training.losses import row_losses
from eagle3_core.training.pointwise import EVERYWHERE, Routes

ROWS = 7
LOSSES = (
    LossConfig(),
    LossConfig(kind="cross_entropy"),
    LossConfig(kind="acceptance"),
    LossConfig(kind="acceptance", acceptance_eta=None, acceptance_weight=0.4),
)


def near(name: str, found: Tensor, wanted: Tensor) -> None:
    """Fails unless two results are equal but for the rounding of the first one's dtype."""
    distance = float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
    assert distance < (1e-6 if found.dtype == torch.float32 else 6e-3), (name, distance)


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def norms(dtype: torch.dtype, width: int = 52) -> None:
    loss, after = torch.tensor([0, 2, 3, 6]), torch.tensor([1, 2, 5])
    places = [
        torch.full((ROWS,), -1).index_copy_(0, index, torch.arange(len(index))) for index in (loss, after)
    ]
    states, weight, delta = torch.randn(ROWS, width), torch.rand(width), torch.randn(ROWS, width).to(dtype)
    both = Routes(loss, places[0], after, places[1])
    nowhere = Routes(None, None, after[:0], torch.full((ROWS,), -1))
    for added, routes in ((None, EVERYWHERE), (delta, EVERYWHERE), (delta, both), (delta, nowhere)):
        num_loss = ROWS if routes.loss is None else len(routes.loss)
        num_after = ROWS if routes.after is None else len(routes.after)
        grads = torch.randn(num_after, width), torch.randn(num_loss, width).to(dtype)
        results = []
        for forward, backward in (
            (norm.forward, norm.backward), (pointwise._norm_forward, pointwise._norm_backward)
        ):  # fmt: skip
            out = poison(num_loss, width, dtype=dtype)
            total, rate, following = forward(states, added, weight, 1e-5, out, routes)
            found = [out, following]
            for a, n in itertools.product((None, grads[0]), (None, grads[1])):
                slot = None if added is None else poison(ROWS, width, dtype=dtype)
                found += [
                    *backward(a, n, total, rate, weight, slot, routes),
                    *([] if slot is None else [slot]),
                ]
            results.append(found)
        for ours, wanted in zip(*results, strict=True):
            near("norm", ours, wanted)


def gates(dtype: torch.dtype, width: int = 2100) -> None:
    both, gradient = torch.randn(ROWS, 2 * width).to(dtype), torch.randn(ROWS, width).to(dtype)
    leaf = both.float().requires_grad_()
    wanted = torch.nn.functional.silu(leaf[:, :width]) * leaf[:, width:]
    (grad,) = torch.autograd.grad(wanted, leaf, gradient.float())
    out = poison(ROWS, width, dtype=dtype)
    gate.forward(both, out)
    near("gate", out, wanted.detach())
    gate.backward(both, gradient)
    near("gate backward", both, grad)


def rotations(dtype: torch.dtype) -> None:
    for (number, depth), added, turned, placed in itertools.product(
        ((3, 14), (4, 16)), (False, True), (False, True), (False, True)
    ):
        size = number * depth
        states = torch.randn(ROWS, 2, number, depth).to(dtype)[:, 1]
        part = torch.randn(11, 2 * size).to(dtype)[:, size:] if added else None
        rows = torch.randperm(11)[:ROWS] if added else None
        places = torch.randperm(9)[:ROWS] if placed else None
        turn = Turn(*torch.randn(2, 20, depth), torch.randint(0, 20, (ROWS,))) if turned else None
        gradient, sums = torch.randn(9, number, depth), torch.randn(11, 2 * size)
        results = []
        for forward, backward in ((rotary.forward, rotary.backward), (heads.rotate, heads.rotate_back)):
            out, total = torch.zeros(9, number, depth, dtype=dtype), sums.clone()
            forward(states, part, rows, turn, out, places)
            back = poison(ROWS, 2, number, depth, dtype=dtype)
            backward(gradient, places, turn, back[:, 0], total[:, :size] if added else None, rows)
            results.append((out, back[:, 0], total))
        for ours, wanted in zip(*results, strict=True):
            near("rotation", ours, wanted)


def diagonals(dtype: torch.dtype) -> None:
    for (number, groups, depth, later), spread in itertools.product(
        ((9, 3, 12, 1), (4, 4, 16, 3), (8, 2, 16, 2)), (False, True)
    ):
        places = torch.randperm(12)[:ROWS].sort().values if spread else None
        size, rows = 12 if spread else ROWS, torch.randperm(13)[:ROWS]
        first, queries, grad_queries = torch.randn(3, size, number, depth).to(dtype)
        lse, grad_out = torch.randn(number, size), torch.randn(ROWS, number, depth).to(dtype)
        keys, values = torch.randn(2, later, 13, groups, depth).to(dtype)
        sums = torch.randn(2, later, 13, groups, depth)
        results: list[tuple[Tensor, ...]] = []
        for forward, backward in (
            (diagonal.forward, diagonal.backward), (attention.merge, attention.merge_backward)
        ):  # fmt: skip
            out, merged, total = poison(ROWS, number, depth, dtype=dtype), first.clone(), lse.clone()
            forward(merged, total, queries, keys, values, rows, places, 0.3, out)
            result, grads = (out, merged, total), (grad_queries.clone(), *sums.clone())
            known = results[0] if results else result  # both are given the same output and log-sum-exp
            backward(
                grad_out,
                queries,
                keys,
                values,
                rows,
                places,
                known[1 if spread else 0],
                known[2],
                0.3,
                *grads,
            )
            results.append((*result, *grads))
        for ours, wanted in zip(*results, strict=True):
            near("diagonal", ours, wanted)


def losses(dtype: torch.dtype, width: int = 53) -> None:
    rows_loss.BLOCK = 16
    teacher, logits = (3 * torch.randn(size, width).to(dtype) for size in (5, ROWS))
    label, weight = torch.randint(0, 5, (ROWS,)), torch.rand(ROWS)
    log_target = teacher.float().log_softmax(-1)
    negative_entropy = (log_target.exp() * log_target).sum(-1)
    sums = rows_loss.teacher_sums(teacher)
    near("teacher", sums.negative_entropy, negative_entropy)
    assert torch.equal(sums.choice, teacher.argmax(-1))
    for loss in LOSSES:
        replaced = logits.clone()
        found, choices = rows_loss.losses_of_rows(loss, replaced, teacher, sums, label, weight, True)
        wanted, grad = row_losses(
            loss, logits.float().clone(), log_target.exp()[label], negative_entropy[label]
        )
        assert grad is not None
        near(loss.kind, found, wanted)
        near(f"{loss.kind} gradient", replaced, grad * weight.unsqueeze(-1))
        assert torch.equal(choices, logits.argmax(-1))


def main() -> None:
    """Each kernel in fp32 and bf16."""
    torch.manual_seed(0)
    for dtype, check in itertools.product(
        (torch.float32, torch.bfloat16), (norms, gates, rotations, diagonals, losses)
    ):
        check(dtype)
        print(check.__name__, dtype)


if __name__ == "__main__":
    main()
