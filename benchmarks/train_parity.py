"""How near our bf16 training step and that of speculators come to the same step in fp32.

Two bf16 computations differ by rounding, and by how much depends on the draft: gradients of a random one
pass a norm that takes most of them away and leaves the rounding. So neither is the measure of the other; the
forward of speculators in fp32 is that of both.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch

from benchmarks.train_sides import Runner, Shape, make_draft, make_samples, ours, theirs

DOCUMENTS, DOCUMENT_TOKENS = 2, 512
MARGIN = 1.25
"""How much farther from fp32 than speculators ours may be."""


def exactness(shape: Shape, steps: int, device: str) -> dict[str, Any]:
    """Relative distances from fp32 of loss and gradients, of ours and of speculators.

    Args:
        shape: of draft and vocabulary; the pack is a small one, half of it with loss.
        steps: of TTT.
        device: cpu or cuda.
    """
    tokens = min(DOCUMENT_TOKENS, shape.document_tokens)
    small = replace(shape, documents=DOCUMENTS, document_tokens=tokens)
    draft = make_draft(small, device, attention="sdpa")
    samples = make_samples(small, 0.5)
    runner = Runner(draft, device)
    names = [name for name, parameter in draft.named_parameters() if parameter.requires_grad]
    with torch.compiler.set_stance("force_eager"):
        true_loss, truth = runner.gradients(theirs(draft, samples, steps, device, torch.float32))
        other_loss, others = runner.gradients(theirs(draft, samples, steps, device))
    loss, mine = runner.gradients(ours(draft, samples, steps, device)[0])
    found = {
        "loss": {"fp32": true_loss, "ours": loss, "speculators": other_loss},
        "ours": _distance(mine, truth),
        "speculators": _distance(others, truth),
        "by_weight": {
            name: {"ours": _distance([a], [c]), "speculators": _distance([b], [c])}
            for name, a, b, c in zip(names, mine, others, truth, strict=True)
        },
    }
    found["equal"] = all(
        each["ours"] <= MARGIN * each["speculators"] for each in [found, *found["by_weight"].values()]
    )
    del draft, runner, truth, others, mine
    gc.collect()
    return found


def _distance(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Norm of the difference of two lists of gradients, relative to that of the second."""
    apart = sum(float((a - b).double().square().sum()) for a, b in zip(found, truth, strict=True))
    whole = sum(float(b.double().square().sum()) for b in truth)
    return (apart / whole) ** 0.5


def say(found: dict[str, Any]) -> str:
    """One line."""
    losses, weights = found["loss"], found["by_weight"]
    apart = {name: abs(losses[name] / losses["fp32"] - 1) for name in ("ours", "speculators")}
    worst = max(weights, key=lambda name: weights[name]["ours"] / weights[name]["speculators"])
    verdict = "as near" if found["equal"] else "NOT AS NEAR"
    return (
        f"distance from fp32: loss {apart['ours']:.1e}, speculators {apart['speculators']:.1e}; gradients "
        f"{found['ours']:.2e}, speculators {found['speculators']:.2e}; at worst "
        f"{weights[worst]['ours']:.2e}, speculators {weights[worst]['speculators']:.2e} ({worst}): {verdict}"
    )
