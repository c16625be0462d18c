"""When bf16 does not tell two logits apart; imports without torch."""

from __future__ import annotations

TIE_TOLERANCE = 2 * 2**-8
"""Two units in the last place of bf16 (8 significant bits), relative to the logit."""


def is_tie(left: float, right: float) -> bool:
    """Whether two logits are equal within `TIE_TOLERANCE` of the greater magnitude."""
    return abs(left - right) <= TIE_TOLERANCE * max(abs(left), abs(right))
