"""Losses of a row against autograd in fp64, and against the eager losses of speculators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3_core.sections import LossConfig
from eagle3_core.training.loss import Teacher, pack_loss, step_weights
from eagle3_core.training.losses import row_losses
from eagle3_core.training.rows import plan_rows

pytestmark = pytest.mark.engine
LOSSES = (
    LossConfig(),
    LossConfig(kind="cross_entropy"),
    LossConfig(kind="acceptance"),
    LossConfig(kind="acceptance", acceptance_eta=1.0),
    LossConfig(kind="acceptance", acceptance_eta=None, acceptance_weight=0.9),
    LossConfig(kind="acceptance", acceptance_eta=None, acceptance_weight=1.0),
)
NAMES = ("kl", "cross-entropy", "hybrid", "eta 1", "weight 0.9", "total variation")


def _plain(loss: LossConfig, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """The definition, [m], as autograd differentiates it."""
    log_draft, log_target = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    if loss.kind == "cross_entropy":
        return torch.nn.functional.cross_entropy(logits, teacher_logits.argmax(-1), reduction="none")
    divergence = (log_target.exp() * (log_target - log_draft)).sum(-1)
    if loss.kind == "kl":
        return divergence
    overlap = torch.minimum(log_target.exp(), log_draft.exp()).sum(-1)
    eta = loss.acceptance_eta
    weight = loss.acceptance_weight if eta is None else 1 - torch.exp(-eta * overlap.detach())
    return (1 - weight) * divergence + weight * (1 - overlap)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_values_and_gradients_equal_autograd_in_fp64(loss: LossConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, wanted = 3 * torch.randn(2, 7, 40, generator=generator, dtype=torch.float64)
    logits[0] = wanted[0] + 0.01 * logits[0]  # one row nearly right
    leaf = logits.clone().requires_grad_()
    expected = _plain(loss, leaf, wanted)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    log_target = wanted.log_softmax(-1)
    target = log_target.exp()
    found, ours = row_losses(loss, logits, target, (target * log_target).sum(-1))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "name"),
    [(LOSSES[0], "kl_div"), (LOSSES[1], "ce"), (LOSSES[2], "lk_hybrid"), (LOSSES[5], "tv")],
)
def test_the_losses_are_those_that_speculators_has(loss: LossConfig, name: str) -> None:
    from speculators.losses import resolve_loss_config

    generator = torch.Generator().manual_seed(1)
    logits, wanted = 2 * torch.randn(2, 9, 50, generator=generator)
    ((theirs, _),) = resolve_loss_config(name, "eager").values()
    log_target = wanted.log_softmax(-1)
    target = log_target.exp()
    found, gradient = row_losses(loss, logits.clone(), target, (target * log_target).sum(-1), False)
    assert gradient is None
    torch.testing.assert_close(found, theirs(logits[None], wanted[None])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_a_pack_in_many_chunks_has_the_gradients_of_the_plain_loss(
    loss: LossConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_core.training.loss.CHUNK_ELEMENTS", 3 * 40)
    generator = torch.Generator().manual_seed(2)
    plan = plan_rows([9, 6], torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1]).bool().numpy(), 2)
    head = torch.randn(40, 8, generator=generator).requires_grad_()
    teacher = Teacher(torch.rand(8, generator=generator), 1e-6, torch.randn(40, 8, generator=generator))
    states = torch.randn(len(plan.labels), 8, generator=generator)
    hidden = [torch.randn(count, 8, generator=generator).requires_grad_() for count in plan.counts]
    weights = step_weights(plan.counts, 0.7)
    parts = pack_loss(hidden, head, states, teacher, plan, weights, loss)
    found = torch.autograd.grad(parts.loss, [head, *hidden])

    wanted = teacher.normalise(states) @ teacher.head.T
    labels = [torch.from_numpy(step.label) for step in plan.steps]
    rows = [_plain(loss, h @ head.T, wanted[label]).sum() for h, label in zip(hidden, labels, strict=True)]
    plain = sum(weight * total for weight, total in zip(weights, rows, strict=True))
    assert isinstance(plain, Tensor)
    torch.testing.assert_close(parts.loss, plain)
    for ours, expected in zip(found, torch.autograd.grad(plain, [head, *hidden]), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    for choice, states_of_step in zip(parts.choices, hidden, strict=True):
        assert torch.equal(choice, (states_of_step @ head.T).argmax(-1))
