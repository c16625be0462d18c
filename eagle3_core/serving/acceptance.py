"""Acceptance figures from what an engine accepted in each target pass; pure, without torch.

The prefill of a prompt produces the first token of its answer and is no drafting pass. Each later target pass
checks up to K drafted tokens and produces the accepted ones and one bonus token. Engines count a pass before
they cut the text at its end, so the last pass of an answer counts drafts behind the end-of-sequence token or
the token limit. Here they are cut off: K = 3, an answer of seven tokens that ends at `E`:

    pass         prefill   1                2               3
    produced     a         b c d            e               f E (g h)
    accepted               b c              -               f E (g)
    counted                2 accepted, 3    0 accepted, 1   2 accepted, 2 produced

Pass 3 tells nothing about position 3, so the conditional rate there does not count it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle3_core.config import RunConfig
from eagle3_core.contracts import AcceptanceFigures, BenchmarkResult
from eagle3_core.errors import BenchmarkError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetPass:
    """One target pass over drafted tokens.

    Attributes:
        drafted: tokens that the draft proposed.
        accepted: those of them that became part of the text, a prefix of the proposal.
        produced: tokens that the pass added to the text: `accepted` + 1, or `accepted` where the text ended
            with an accepted token.
    """

    drafted: int
    accepted: int
    produced: int

    def observes(self, position: int) -> bool:
        """Whether the pass decided on `position` (from 1), all earlier ones being accepted."""
        if position <= self.accepted:
            return True
        rejected = self.produced > self.accepted
        return rejected and position == self.accepted + 1 and position <= self.drafted


def text_passes(drafted: Sequence[int], accepted: Sequence[int], num_tokens: int) -> list[TargetPass]:
    """The passes that made one answer, without what lies behind its end.

    Args:
        drafted: proposed tokens of each pass, in order.
        accepted: tokens that the engine counted as accepted in each pass.
        num_tokens: tokens of the answer, its first (from the prefill) and its end token included.

    Tokens that no counted pass explains came from passes without a proposal; they are added as such.
    """
    remaining = max(0, num_tokens - 1)
    passes = []
    for proposed, agreed in zip(drafted, accepted, strict=True):
        produced = min(agreed + 1, remaining)
        if produced == 0:
            break
        passes.append(TargetPass(proposed, min(agreed, produced), produced))
        remaining -= produced
    return passes + [TargetPass(0, 0, 1)] * remaining


def acceptance_figures(
    answers: Iterable[Sequence[TargetPass]], num_speculative_tokens: int
) -> AcceptanceFigures:
    """Acceptance length, per-position and conditional rates over all passes of all answers.

    Raises:
        BenchmarkError: there is no pass with a proposal, so nothing was measured.
    """
    by_answer = [list(passes) for passes in answers]
    passes = [one for group in by_answer for one in group]
    if not any(one.drafted for one in passes):
        raise BenchmarkError(
            f"the draft proposed nothing in {len(passes)} target passes over {len(by_answer)} prompts",
            expected="drafted tokens in every pass",
            remedy="check that the engine loaded the draft, and that answers are longer than one token",
        )
    positions = range(1, num_speculative_tokens + 1)
    accepted = [sum(one.accepted >= k for one in passes) for k in positions]
    observed = [sum(one.observes(k) for one in passes) for k in positions]
    return AcceptanceFigures(
        num_speculative_tokens=num_speculative_tokens,
        acceptance_length=sum(one.produced for one in passes) / len(passes),
        per_position=[count / len(passes) for count in accepted],
        conditional=[a / o if o else None for a, o in zip(accepted, observed, strict=True)],
        num_passes=len(passes),
        num_samples=len(by_answer),
    )


def check_acceptance(result: BenchmarkResult, config: RunConfig) -> None:
    """Hold a measured result, new or reused, against the limits of the run.

    In a rehearsal (`config.limit`) a low acceptance length and too many ties are only warnings; an output
    that the draft changed is an error in any case.

    Raises:
        BenchmarkError: the output with the draft differs, no drafted token was accepted, or the acceptance
            length is below `benchmark.min_acceptance_length`.
    """
    _check_lossless(result, config)
    figures, limit = result.acceptance, config.benchmark.min_acceptance_length
    if figures.acceptance_length <= 1:
        _fail_or_warn(
            config,
            BenchmarkError(
                f"the target accepted no drafted token in {figures.num_passes} passes",
                expected="a draft that makes serving faster",
                remedy="compare with the acceptance length on held-out samples in the training's log: where "
                "that is above 1, trainer and engine differ; otherwise train longer",
            ),
        )
    elif figures.acceptance_length < limit:
        conditions = f"K={figures.num_speculative_tokens} on {figures.num_samples} prompts"
        measured = f"the acceptance length is {figures.acceptance_length:.3f} with {conditions}"
        _fail_or_warn(
            config,
            BenchmarkError(
                measured,
                expected=f"at least benchmark.min_acceptance_length = {limit:g}",
                remedy="train longer or on more data, or lower the limit",
            ),
        )


def _check_lossless(result: BenchmarkResult, config: RunConfig) -> None:
    if result.lossless != "differs":
        return
    changed = [one for one in result.comparisons if one.first_difference is not None and not one.tie]
    ties = sum(one.tie for one in result.comparisons)
    if changed:
        first = changed[0]
        raise BenchmarkError(
            f"the draft changed the output of {len(changed)} of {result.num_prompts} prompts, first "
            f"{first.key} at token {first.first_difference}",
            expected="the same greedy tokens with and without the draft, rounding ties apart",
            remedy="outputs.jsonl of the benchmark artifact holds both",
        )
    _fail_or_warn(
        config,
        BenchmarkError(
            f"{ties} of {result.num_prompts} prompts differ at a rounding tie",
            expected="at most one in ten",
            remedy="outputs.jsonl of the benchmark artifact holds both outputs",
        ),
    )


def _fail_or_warn(config: RunConfig, error: BenchmarkError) -> None:
    if config.limit is None:
        raise error
    logger.warning("%s (a rehearsal on %d prompts goes on)", error, config.limit)
