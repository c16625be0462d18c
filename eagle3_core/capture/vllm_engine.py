"""Drives an unpatched vLLM through shards of a capture.

Each sample is one request of its token ids with one new token; `SampleFeed` says which is sent when. vLLM
hands a request's states to the connector in an engine step after the one in which the request ended; where no
later request causes that step, a flush request does.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.feed import OnTokens, SampleFeed, Take
from eagle3_core.capture.job import CaptureJob, EngineEndedError, check_positions
from eagle3_core.capture.vllm_support import check_vllm_support
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError
from eagle3_core.sections import CAPTURE_MARGIN_TOKENS
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import PlannedShard
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.vllm_engine import load_vllm

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

logger = logging.getLogger(__name__)

DISK_POLL_SECONDS = 0.002


def capture_with_vllm(
    config: RunConfig,
    info: TargetInfo,
    job: CaptureJob,
    samples: Sequence[Sample],
    on_tokens: OnTokens,
    take: Take | None = None,
) -> Iterator[tuple[PlannedShard, FileEntry]]:
    """Capture shards in one engine session and yield each when it is written.

    Args:
        config: the run's.
        info: the target.
        job: what to capture.
        samples: all samples of the dataset, in order.
        on_tokens: called with the number of newly captured tokens; first with 0, when the engine is loaded.
        take: gives the next shard, or None when there is none left; by default the job's, in order.

    Raises:
        CaptureError: vLLM cannot capture this target, its settings are unfit, or it returned other rows than
            asked for.
        EngineEndedError: the engine died.
    """
    check_vllm_support(info, job.capture_ids)
    longest = max(len(sample) for shard in job.shards for sample in job.samples_of(shard, samples))
    llm = _load(config, info, job, engine_arguments(config, info, job, longest))
    try:
        check_settings(llm.llm_engine.vllm_config, longest)
        on_tokens(0)
        yield from VllmDriver(llm, job, samples, on_tokens, take).run()
    finally:
        llm.llm_engine.engine_core.shutdown()


def engine_arguments(config: RunConfig, info: TargetInfo, job: CaptureJob, longest: int) -> dict[str, Any]:
    """What vLLM is started with, beyond the run's common settings.

    Raises:
        CaptureError: a sample is too long for the target's positions.
    """
    check_positions(info, longest, CAPTURE_MARGIN_TOKENS)
    return {
        "max_model_len": longest + CAPTURE_MARGIN_TOKENS,
        "max_num_batched_tokens": config.capture.max_batched_tokens,
        "enable_chunked_prefill": True,
        "disable_log_stats": True,
        # Of a multimodal wrapper only the language model: no vision tower, no image processor.
        **({"language_model_only": True} if info.nested_under else {}),
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(job.capture_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "ShardConnector",
            "kv_connector_module_path": "eagle3_core.capture.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"job": job.model_dump(mode="json")},
        },
    }


def check_settings(vllm_config: Any, longest: int) -> None:
    """Refuse an engine that would return fewer rows than tokens, before any request is sent.

    Raises:
        CaptureError: prefix caching is on, or the longest sample does not fit with its margin, or not into
            one step of an engine that computes prompts whole (vLLM does so for latent attention on the CPU):
            it would wait for ever.
    """
    if vllm_config.cache_config.enable_prefix_caching:
        raise CaptureError(
            "prefix caching is on in the capture engine: shared prefixes would have no states",
            expected="enable_prefix_caching=False",
        )
    room = vllm_config.model_config.max_model_len
    if longest + CAPTURE_MARGIN_TOKENS > room:
        raise CaptureError(
            f"the capture engine takes {room:,} tokens", expected=f"{longest + CAPTURE_MARGIN_TOKENS:,}"
        )
    scheduler = vllm_config.scheduler_config
    step = getattr(scheduler, "max_num_scheduled_tokens", None) or scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and longest > step:
        raise CaptureError(
            f"vLLM computes prompts of this target whole, {step:,} tokens in a step at most, and the longest "
            f"sample has {longest:,}",
            remedy=f"set capture.max_batched_tokens to at least {longest}",
        )


class VllmDriver:
    """Sends samples to a loaded engine and watches for finished shards."""

    def __init__(
        self,
        llm: LLM,
        job: CaptureJob,
        samples: Sequence[Sample],
        on_tokens: OnTokens,
        take: Take | None = None,
    ) -> None:
        self._engine, self._job, self._samples, self._on_tokens = llm.llm_engine, job, samples, on_tokens
        step_tokens = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        self._feed: SampleFeed[str] = SampleFeed(job, samples, take, step_tokens)
        self._is_flushed = False
        self._numbers = itertools.count()

    def run(self) -> Iterator[tuple[PlannedShard, FileEntry]]:
        """Yield each shard that `take` gives with its manifest entry when it is written."""
        while not self._feed.is_done:
            yield from self._feed.finished()
            self._job.raise_failure()
            self._feed.refill()
            self._send()
            if self._engine.has_unfinished_requests():
                self._step()
            elif self._feed.unfinished:
                self._flush()

    def _send(self) -> None:
        from vllm.inputs import TokensPrompt

        for sample in self._feed.to_send():
            number = f"sample-{next(self._numbers)}"
            prompt = TokensPrompt(prompt_token_ids=sample.input_ids.tolist())
            self._engine.add_request(number, prompt, _sampling(eagle3_sample=sample.key))
            self._feed.sent(number, sample)
            self._is_flushed = False

    def _step(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs: list[RequestOutput] = self._engine.step()  # type: ignore[assignment]
        except EngineDeadError as error:
            self._job.raise_failure()
            raise EngineEndedError(
                f"the capture engine ended ({error})", remedy="the first error in the log says why"
            ) from error
        done = [output for output in outputs if output.finished and output.request_id in self._feed.in_flight]
        for output in done:
            self._check_output(output)
        self._on_tokens(sum(len(output.prompt_token_ids or ()) for output in done))

    def _check_output(self, output: RequestOutput) -> None:
        sample = self._feed.answered(output.request_id)
        if output.num_cached_tokens:
            raise CaptureError(
                f"sample {sample.key}: {self._job.engine} computed "
                f"{len(sample) - output.num_cached_tokens} rows for {len(sample)} tokens",
                expected="a row for every token",
                remedy="turn prefix caching off",
            )

    def _flush(self) -> None:
        """Cause the step that hands over the last states, then wait until a shard is on disk."""
        from vllm.inputs import TokensPrompt

        if not self._is_flushed:
            prompt = TokensPrompt(prompt_token_ids=self._samples[0].input_ids[:1].tolist())
            shards = [shard.index for shard in self._feed.unfinished]
            number = f"flush-{next(self._numbers)}"
            self._engine.add_request(number, prompt, _sampling(eagle3_flush=shards))
            while self._engine.has_unfinished_requests():
                self._step()
            self._is_flushed = True
        time.sleep(DISK_POLL_SECONDS)


def _load(config: RunConfig, info: TargetInfo, job: CaptureJob, arguments: dict[str, Any]) -> LLM:
    try:
        return load_vllm(config, info.path, **arguments)
    except Exception as error:
        job.raise_failure()
        if isinstance(error, CaptureError):
            raise
        raise CaptureError(
            f"vLLM could not load {info.path} for capture ({type(error).__name__}: {error})",
            remedy="the first error in the log says why",
        ) from error


def _sampling(**parameters: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, extra_args={"kv_transfer_params": parameters}
    )
