"""Acceptance of a draft, estimated by replaying greedy speculative decoding on stored answers.

The target's greedy answers are stored, so decoding them again needs no target: in each pass the draft's
choices are compared with the stored tokens. While choices are right, the draft reads the true tokens, and
after the first wrong one nothing counts; so the choices of the unrolled, teacher-forced draft are those that
it makes when it decodes.

A sample with a prompt of two and five answer tokens, K = 2. The first answer token comes with the prompt's
pass; the draft's choices from row t are for x[t+2] and x[t+3]:

    j            0    1    2    3    4    5    6
    x            p    p    a    b    c    d    end
    pass 1       row 1 (token a known): choices for b, c; both right      -> b, c and the target's own d
    pass 2       row 4 (token d known): choices for end, and beyond       -> end

Three tokens and one: acceptance length 2.0 in two passes. A choice beyond the answer's end is not accepted,
whatever it is, and the target adds no token after the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle3_core.contracts import AcceptanceFigures
from eagle3_core.serving.acceptance import TargetPass, acceptance_figures


def replay_passes(correct: np.ndarray, prompt_length: int, num_tokens: int) -> list[TargetPass]:
    """Decode one stored answer again.

    Args:
        correct: [K, S] bool; entry [k, t] says whether the draft's choice at step k from row t is the token
            x[t+2+k]. Entries for tokens outside the answer are not read.
        prompt_length: index of the first answer token.
        num_tokens: answer tokens that decoding produces, end-of-turn token included.

    Returns:
        The passes after the prompt's own.
    """
    depth = len(correct)
    passes, row = [], prompt_length - 1
    while (remaining := num_tokens - (row + 2 - prompt_length)) > 0:
        accepted = 0
        while accepted < min(depth, remaining) and correct[accepted, row]:
            accepted += 1
        produced = min(accepted + 1, remaining)
        passes.append(TargetPass(depth, accepted, produced))
        row += produced
    return passes


def replay_figures(answers: Sequence[Sequence[TargetPass]], num_speculative_tokens: int) -> AcceptanceFigures:
    """Rates over all passes of all answers; where no answer has a second token, an acceptance length of 1."""
    if any(answers):
        return acceptance_figures(answers, num_speculative_tokens)
    return AcceptanceFigures(
        num_speculative_tokens=num_speculative_tokens,
        acceptance_length=1.0,
        per_position=[0.0] * num_speculative_tokens,
        conditional=[None] * num_speculative_tokens,
        num_passes=0,
        num_samples=len(answers),
    )
