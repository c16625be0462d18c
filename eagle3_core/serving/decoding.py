"""Greedy decoding in vLLM with or without a draft, and what the engine says about it.

One engine at a time lives in the process: `DecodingEngine` is a context manager that frees everything, so
that the next one can be loaded.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eagle3_core.config import RunConfig
from eagle3_core.serving.stepwise import WatchedAnswer, decode_stepwise
from eagle3_core.target.vllm_engine import load_vllm

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.v1.metrics.stats import RequestStateStats

logger = logging.getLogger(__name__)

COUNTER_PREFIX = "vllm:spec_decode_num_"
CPU_INSTRUCTIONS = "AVX512_CORE_BF16"
"""The most that matrix products on the CPU may use. With AMX a product of few rows is rounded otherwise than
one of many, and so a draft changes the text: 17 of 32 answers of SmolLM2-135M, and none without AMX."""


@dataclass(frozen=True)
class Decoded:
    """One greedy answer.

    Attributes:
        token_ids: the answer, its end-of-sequence token included.
        drafted: proposed tokens of each target pass; empty without a draft.
        accepted: tokens that the engine counted as accepted in each pass, behind the end of the text too.
        decode_seconds: from the answer's first token to its last.
        num_unseen: tokens at the end that the engine may have counted as accepted besides; 0 where it records
            its passes.
    """

    token_ids: list[int]
    drafted: list[int]
    accepted: list[int]
    decode_seconds: float
    num_unseen: int = 0


@dataclass(frozen=True)
class EngineCounters:
    """The engine's own totals since it was loaded.

    Attributes:
        drafts: passes over drafted tokens.
        accepted: drafted tokens that became part of the text, or lie behind its end.
        accepted_per_position: those of each position.
        preemptions: answers put back for want of room in the KV cache; each begins again with a pass over
            all that is known of it, without drafted tokens.
    """

    drafts: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    preemptions: int = 0

    def since(self, earlier: EngineCounters) -> EngineCounters:
        """What was counted after `earlier`."""
        pairs = zip(self.accepted_per_position, earlier.accepted_per_position, strict=True)
        return EngineCounters(
            self.drafts - earlier.drafts,
            self.accepted - earlier.accepted,
            tuple(now - before for now, before in pairs),
            self.preemptions - earlier.preemptions,
        )


class DecodingEngine:
    """A vLLM engine for greedy decoding of token-id prompts; use it in a `with` block.

    Args:
        config: the run; `benchmark` says K, concurrency and the longest answer.
        target_path: folder of the target.
        draft_path: exported folder, or None to decode without a draft.
    """

    def __init__(self, config: RunConfig, target_path: str, draft_path: Path | None = None) -> None:
        self._config, self._target_path, self._draft_path = config, target_path, draft_path
        self._llm: LLM | None = None

    def __enter__(self) -> DecodingEngine:
        benchmark = self._config.benchmark
        settings: dict[str, Any] = {"max_num_seqs": benchmark.concurrency, "disable_log_stats": False}
        if self._draft_path is not None:
            if records_passes():
                settings["per_request_spec_decode_metrics"] = "detailed"
            settings["speculative_config"] = {
                "model": str(self._draft_path),
                "method": "eagle3",
                "num_speculative_tokens": benchmark.num_speculative_tokens,
            }
        if self._config.engine.device == "cpu":
            os.environ.setdefault("ONEDNN_MAX_CPU_ISA", CPU_INSTRUCTIONS)
        self._llm = load_vllm(self._config, self._target_path, **settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the model, the KV cache and the distributed state."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()

    @property
    def llm(self) -> LLM:
        """The loaded engine."""
        assert self._llm is not None, "used outside its with block"
        return self._llm

    def decode(self, prompts: Sequence[list[int]], max_tokens: int) -> list[Decoded]:
        """Answers in the order of the prompts, at most `benchmark.concurrency` of them at once."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
        has_draft = self._draft_path is not None
        if has_draft and not records_passes():
            depth = self._config.benchmark.num_speculative_tokens
            return [_watched(answer, depth) for answer in decode_stepwise(self.llm, prompts, sampling)]
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        return [_decoded(output, has_draft=has_draft) for output in outputs]

    def counters(self) -> EngineCounters:
        """The engine's totals now."""
        metrics: dict[str, Any] = {metric.name: metric for metric in self.llm.get_metrics()}
        return EngineCounters(
            drafts=metrics[f"{COUNTER_PREFIX}drafts"].value,
            accepted=metrics[f"{COUNTER_PREFIX}accepted_tokens"].value,
            accepted_per_position=tuple(metrics[f"{COUNTER_PREFIX}accepted_tokens_per_pos"].values),
            preemptions=metrics["vllm:num_preemptions"].value,
        )


def _decoded(output: RequestOutput, *, has_draft: bool) -> Decoded:
    answer = output.outputs[0]
    passes = answer.spec_decode_metrics if has_draft else None
    return Decoded(
        token_ids=list(answer.token_ids),
        drafted=list(passes.per_step_drafted) if passes else [],
        accepted=list(passes.per_step_accepted) if passes else [],
        decode_seconds=_decode_seconds(output.metrics),
    )


def _watched(answer: WatchedAnswer, num_speculative_tokens: int) -> Decoded:
    drafted, accepted = answer.passes(num_speculative_tokens)
    return Decoded(
        token_ids=answer.token_ids,
        drafted=drafted,
        accepted=accepted,
        decode_seconds=_decode_seconds(answer.metrics),
        num_unseen=num_speculative_tokens - accepted[-1] if accepted else 0,
    )


def _decode_seconds(times: RequestStateStats | None) -> float:
    assert times is not None, "the engine was loaded with disable_log_stats=False"
    return max(0.0, times.last_token_ts - times.first_token_ts)


def records_passes() -> bool:
    """Whether this vLLM can record what was drafted and accepted in each pass of a request."""
    from vllm.config import ObservabilityConfig

    return hasattr(ObservabilityConfig, "per_request_spec_decode_metrics")
