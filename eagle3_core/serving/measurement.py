"""Decodes the benchmark's prompts without and with a draft, one engine after the other.

Outputs are compared between the runs at `benchmark.concurrency`, and speed is taken from runs of one sequence
at a time. The two are kept apart because a CPU multiplies one or two rows by another kernel than four or
more, which rounds bf16 differently: with SmolLM2-135M, 13 of 32 outputs of 64 tokens decoded one at a time
differ from those of the same engine at 32 sequences, but only 3 of 96 between the engines without and with a
draft at 32, all of them ties. A pass over drafted tokens has K + 1 rows at least, so the baseline gets
`MIN_ROWS` too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.config import RunConfig
from eagle3_core.errors import BenchmarkError
from eagle3_core.serving.acceptance import TargetPass, text_passes
from eagle3_core.serving.decoding import Decoded, DecodingEngine, EngineCounters
from eagle3_core.step import Progress

logger = logging.getLogger(__name__)

WARMUP_TOKENS = 8
REMEDY = "these acceptance figures cannot be trusted; report the engine's version"
REMEDY_FOR_PREEMPTIONS = (
    "the KV cache had no room for all answers at once, so some began again: lower benchmark.concurrency, "
    "or give the engine more memory"
)
MIN_ROWS = 8
"""Sequences that the baseline decodes at once at least, by repeating prompts where there are fewer."""


@dataclass(frozen=True)
class Runs:
    """What the engines produced, in the order of the prompts.

    Attributes:
        baseline: without the draft, at the configured concurrency.
        draft: with it, likewise; the source of the acceptance figures.
        counted: the engine's own totals over `draft`.
        single_baseline: without the draft, one sequence at a time; None if speed is not measured.
        single_draft: with it, likewise.
    """

    baseline: list[Decoded]
    draft: list[Decoded]
    counted: EngineCounters
    single_baseline: list[Decoded] | None
    single_draft: list[Decoded] | None

    def passes(self) -> list[list[TargetPass]]:
        """The target passes of each answer of `draft`, cut at the end of the text.

        Raises:
            BenchmarkError: the engine's totals are not the sum over the answers, as where an engine that
                records no passes had to put answers back.
        """
        drafts = sum(len(one.accepted) for one in self.draft)
        accepted = sum(sum(one.accepted) for one in self.draft)
        unseen = sum(one.num_unseen for one in self.draft)
        if self.counted.drafts != drafts or not accepted <= self.counted.accepted <= accepted + unseen:
            sum_of_accepted = f"{accepted} to {accepted + unseen}" if unseen else f"{accepted}"
            raise BenchmarkError(
                f"the engine counted {self.counted.drafts} passes, {self.counted.accepted} accepted tokens",
                expected=f"{drafts} and {sum_of_accepted}, the sum over the answers",
                remedy=REMEDY_FOR_PREEMPTIONS if self.counted.preemptions else REMEDY,
            )
        return [text_passes(one.drafted, one.accepted, len(one.token_ids)) for one in self.draft]


class _Counter:
    """Reports decoded prompts over all runs."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, num_prompts: int, what: str) -> None:
        self._done += num_prompts
        self._progress(self._done, self._total, "prompts", what)


def decode_with_and_without(
    config: RunConfig, target_path: str, draft_path: Path, prompts: list[list[int]], progress: Progress
) -> Runs:
    """Decode all prompts in every way that the benchmark needs."""
    benchmark = config.benchmark
    counter = _Counter(progress, len(prompts) * (4 if benchmark.measure_speed else 2))
    with DecodingEngine(config, target_path) as engine:
        _warm_up(engine, prompts)
        repeated = prompts * -(-MIN_ROWS // len(prompts))
        baseline = engine.decode(repeated, benchmark.max_tokens)[: len(prompts)]
        counter.add(len(prompts), "without draft")
        single_baseline = _one_by_one(engine, prompts, config, counter, "without draft, one at a time")
    with DecodingEngine(config, target_path, draft_path) as engine:
        _warm_up(engine, prompts)
        before = engine.counters()
        draft = engine.decode(prompts, benchmark.max_tokens)
        counted = engine.counters().since(before)
        counter.add(len(prompts), "with draft")
        single_draft = _one_by_one(engine, prompts, config, counter, "with draft, one at a time")
    return Runs(baseline, draft, counted, single_baseline, single_draft)


def tokens_per_second(answers: Sequence[Decoded] | None) -> float | None:
    """Tokens after the first of each answer per second of decoding; None if there are none."""
    tokens = sum(len(one.token_ids) - 1 for one in answers or ())
    seconds = sum(one.decode_seconds for one in answers or ())
    return tokens / seconds if tokens and seconds else None


def _warm_up(engine: DecodingEngine, prompts: list[list[int]]) -> None:
    engine.decode(prompts[:1], WARMUP_TOKENS)


def _one_by_one(
    engine: DecodingEngine, prompts: list[list[int]], config: RunConfig, counter: _Counter, what: str
) -> list[Decoded] | None:
    if not config.benchmark.measure_speed:
        return None
    answers = []
    for prompt in prompts:
        answers += engine.decode([prompt], config.benchmark.max_tokens)
        counter.add(1, what)
    return answers
