"""Compares greedy outputs with and without the draft, token by token.

Legend: S tokens of a prefix, V target vocabulary.

A draft must not change the output. In bf16 two runs that batch differently may still pick different
tokens where two logits are equal within rounding: such a first difference is a tie. What follows it is
another text and is not compared.

    baseline   a b c d e
    draft      a b x y z      first difference at 2; `c` and `x` are compared by a reference forward on a b
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle3_core.config import RunConfig
from eagle3_core.contracts import PromptComparison
from eagle3_core.target.info import inspect_target
from eagle3_core.target.rounding import is_tie

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_TIE_FRACTION = 0.1

Lossless = Literal["identical", "ties", "differs"]


@dataclass(frozen=True)
class OutputPair:
    """One prompt and its two greedy outputs, as token ids."""

    key: str
    prompt: list[int]
    baseline: list[int]
    draft: list[int]

    @property
    def first_difference(self) -> int | None:
        """The first output position at which the two differ, a missing token included; None if equal."""
        pairs = zip(self.baseline, self.draft, strict=False)
        shorter = min(len(self.baseline), len(self.draft))
        same_length = len(self.baseline) == len(self.draft)
        return next((j for j, (a, b) in enumerate(pairs) if a != b), None if same_length else shorter)


NextLogits = Callable[[list[int]], "torch.Tensor"]
"""Maps a prefix of S token ids to the [V] fp32 logits of the next token."""


def compare_outputs(
    pairs: Sequence[OutputPair], load_reference: Callable[[], NextLogits]
) -> list[PromptComparison]:
    """Compare all pairs; the reference is loaded only if some pair differs."""
    reference: NextLogits | None = None
    comparisons = []
    for pair in pairs:
        position = pair.first_difference
        tie, margin = False, None
        if position is not None and position < min(len(pair.baseline), len(pair.draft)):
            reference = reference or load_reference()
            logits = reference(pair.prompt + pair.baseline[:position])
            left, right = float(logits[pair.baseline[position]]), float(logits[pair.draft[position]])
            tie, margin = is_tie(left, right), abs(left - right)
            logger.info(
                "%s differs at token %d: reference logits %.4f and %.4f, %s",
                pair.key, position, left, right, "a tie" if tie else "not a tie",
            )  # fmt: skip
        comparisons.append(
            PromptComparison(
                key=pair.key,
                num_tokens=len(pair.draft),
                first_difference=position,
                tie=tie,
                margin=margin,
            )
        )
    return comparisons


def classify(comparisons: Sequence[PromptComparison]) -> Lossless:
    """`identical`, `ties`, or `differs`: a difference that is no tie, or ties in over a tenth of prompts."""
    different = [one for one in comparisons if one.first_difference is not None]
    if not different:
        return "identical"
    too_many = len(different) > MAX_TIE_FRACTION * len(comparisons)
    return "differs" if too_many or not all(one.tie for one in different) else "ties"


def load_reference(config: RunConfig, target_path: str) -> NextLogits:
    """The target in transformers, in fp32 on the run's device.

    Raises:
        TargetError: transformers cannot load it.
    """
    import torch

    from eagle3_core.capture.reference import ReferenceModel

    model = ReferenceModel(
        inspect_target(Path(target_path)), "float32", config.engine.device, config.target.trust_remote_code
    )

    def next_logits(prefix: list[int]) -> torch.Tensor:
        _, logits = model.forward(torch.tensor(prefix), ())
        return logits[-1].cpu()

    return next_logits
