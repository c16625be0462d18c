"""Greedy decoding that watches what each target pass adds to an answer, for engines without records.

Newer releases of vLLM record the passes of each request (`per_request_spec_decode_metrics`), older ones count
totals only. There the engine is stepped by hand and hands out the new tokens of each step: those of an answer
behind its first token are passes, and a pass adds its accepted tokens and one more. An answer that ends with
`E`:

    step        1    2        3    4
    new         a    b c d    e    f E
    accepted         2        0    1 or 2

The engine cuts the last pass at the end of the text, so nobody sees whether `E` was accepted or came after
the accepted tokens. It is taken as not drafted: the acceptance length is exact, and the rates leave out that
one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


@dataclass
class WatchedAnswer:
    """What the engine handed out of one answer.

    Attributes:
        new: token ids of each step that added some, in order; the first step is the prefill's.
        metrics: the engine's record of times, once the answer has ended.
    """

    new: list[list[int]] = field(default_factory=list)
    metrics: Any = None

    @property
    def token_ids(self) -> list[int]:
        """The whole answer."""
        return [token for step in self.new for token in step]

    def passes(self, num_speculative_tokens: int) -> tuple[list[int], list[int]]:
        """Drafted and accepted tokens of each pass; of the last one, those that are seen to be accepted."""
        accepted = [len(tokens) - 1 for tokens in self.new[1:]]
        drafted = [num_speculative_tokens] * (len(accepted) - 1) + accepted[-1:]
        return drafted, accepted


def decode_stepwise(llm: LLM, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[WatchedAnswer]:
    """Answers in the order of the prompts.

    Args:
        llm: an engine that does nothing else meanwhile.
        prompts: token ids.
        sampling: of all of them.
    """
    from vllm.sampling_params import RequestOutputKind

    answers = [WatchedAnswer() for _ in prompts]
    for number, prompt in enumerate(prompts):
        own = sampling.clone()
        own.output_kind = RequestOutputKind.DELTA
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, own)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            answer = answers[int(output.request_id)]
            if tokens := list(output.outputs[0].token_ids):
                answer.new.append(tokens)
            if output.finished:
                answer.metrics = output.metrics
    return answers
