"""Drives an unpatched SGLang through shards of a capture.

Each sample is one request of its token ids with one new token; its request id names the sample. Hooks in the
scheduler process (`sglang_hook`) read the states. Before the first sample, checks show that all hooks see
their layers. At most `REQUESTS_PER_SLOT` requests for each of the engine's sequences are in flight. A shard's
file may appear after the last reply.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.feed import OnTokens, SampleFeed, Take
from eagle3_core.capture.job import CaptureJob, EngineEndedError
from eagle3_core.capture.sglang_batch import check_rid, sample_rid
from eagle3_core.capture.sglang_plan import (
    READY_NAME,
    check_settings,
    engine_arguments,
    num_checks,
    variant_of,
)
from eagle3_core.capture.sglang_transport import HttpServer, InProcess, Transport
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError, Eagle3Error
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import PlannedShard
from eagle3_core.target.info import TargetInfo

logger = logging.getLogger(__name__)

REQUESTS_PER_SLOT = 2
"""The engine must have the next requests before it has answered those that it computes."""
WAIT_SECONDS = 0.5
POLL_SECONDS = 0.05
CHECK_TOKENS = 8
CHECK_SECONDS = 30.0
WRITE_SECONDS = 300.0
"""Without a newly written shard for this time after the last reply, the writer is given up."""


def capture_with_sglang(
    config: RunConfig,
    info: TargetInfo,
    job: CaptureJob,
    samples: Sequence[Sample],
    on_tokens: OnTokens,
    take: Take | None = None,
) -> Iterator[tuple[PlannedShard, FileEntry]]:
    """Capture shards in one engine session and yield each when it is written.

    Same interface as `eagle3_core.capture.vllm_engine.capture_with_vllm`.

    Raises:
        CaptureError: the engine's settings are unfit, hooks do not see their layers, or it returned other
            rows than asked for.
        EngineEndedError: the engine died.
    """
    longest = max(len(sample) for shard in job.shards for sample in job.samples_of(shard, samples))
    variant = variant_of(config, info)
    engine = _load(config, job, engine_arguments(config, info, job, longest, variant))
    try:
        check_settings(engine.settings(), longest)
        driver = SglangDriver(config, engine, job, samples, on_tokens, take)
        driver.check_hooks(num_checks(variant))
        on_tokens(0)
        yield from driver.run()
    finally:
        engine.close()


class SglangDriver:
    """Sends samples to a loaded engine and watches for finished shards."""

    def __init__(
        self,
        config: RunConfig,
        engine: Transport,
        job: CaptureJob,
        samples: Sequence[Sample],
        on_tokens: OnTokens,
        take: Take | None = None,
    ) -> None:
        self._engine, self._job, self._samples, self._on_tokens = engine, job, samples, on_tokens
        self._journal = job.journal
        most_requests = REQUESTS_PER_SLOT * config.engine.max_num_seqs
        self._feed: SampleFeed[Future[dict[str, Any]]] = SampleFeed(
            job, samples, take, config.capture.max_batched_tokens, most_requests
        )
        self._indices = {sample.key: index for index, sample in enumerate(samples)}
        self._last_news = time.monotonic()

    def check_hooks(self, count: int) -> None:
        """Send a few tokens and see that every hook sees its layer.

        Raises:
            CaptureError: one does not, or none of them was attached.
        """
        ids = self._samples[self._job.shards[0].start].input_ids[:CHECK_TOKENS].tolist()
        try:
            for number in range(count):
                self._await(self._engine.send(check_rid(number), ids))
        except EngineEndedError as error:
            raise CaptureError(
                f"{self._job.engine} ended in its first forward pass of this target",
                remedy="the log says why; another sglang_attention_backend or capture.engine may do better",
            ) from error
        deadline = time.monotonic() + CHECK_SECONDS
        while not (Path(self._job.folder) / READY_NAME).exists():
            self._job.raise_failure()
            self._engine.check_alive()
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"{self._job.engine} ran, but no hook of the capture saw a batch",
                    expected="a module named logits_processor in the target",
                    remedy="set capture.engine to vllm or reference",
                )
            time.sleep(POLL_SECONDS)

    def run(self) -> Iterator[tuple[PlannedShard, FileEntry]]:
        """Yield each shard that `take` gives with its manifest entry when it is written."""
        while not self._feed.is_done:
            for written in self._feed.finished():
                self._last_news = time.monotonic()
                yield written
            self._job.raise_failure()
            self._feed.refill()
            for sample in self._feed.to_send():
                self._journal.started(sample.key)
                rid = sample_rid(self._indices[sample.key])
                self._feed.sent(self._engine.send(rid, sample.input_ids.tolist()), sample)
            if self._feed.in_flight:
                self._receive()
            elif self._feed.unfinished:
                self._await_writer()

    def _receive(self) -> None:
        done, _ = wait(self._feed.in_flight, timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)
        if not done:
            self._engine.check_alive()
        tokens = 0
        for reply in done:
            sample = self._feed.answered(reply)
            self._check_reply(sample, self._await(reply))
            self._journal.finished(sample.key)
            tokens += len(sample)
        if tokens:
            self._last_news = time.monotonic()
            self._on_tokens(tokens)

    def _check_reply(self, sample: Sample, reply: dict[str, Any]) -> None:
        prompt, cached = reply.get("prompt_tokens"), reply.get("cached_tokens")
        reason = (reply.get("finish_reason") or {}).get("type")
        if prompt != len(sample) or cached != 0 or reason == "abort":
            raise CaptureError(
                f"sample {sample.key}: {self._job.engine} ran {prompt} tokens, {cached} of them from its "
                f"cache (ended by {reason})",
                expected=f"all {len(sample)} computed",
                remedy="turn the radix cache off and capture again",
            )

    def _await(self, reply: Future[dict[str, Any]]) -> dict[str, Any]:
        """The reply to a request; while there is none, look whether the engine still lives."""
        while not reply.done():
            wait([reply], timeout=WAIT_SECONDS)
            self._job.raise_failure()
            self._engine.check_alive()
        try:
            return reply.result()
        except Exception as error:
            self._job.raise_failure()
            self._engine.check_alive()
            if isinstance(error, Eagle3Error):
                raise
            raise CaptureError(f"SGLang did not answer ({type(error).__name__}: {error})") from error

    def _await_writer(self) -> None:
        """Give the writer time: all requests are answered, but shards are still being written."""
        self._engine.check_alive()
        if self._job.paused() is not None:
            self._last_news = time.monotonic()
        if time.monotonic() - self._last_news > WRITE_SECONDS:
            names = ", ".join(shard.file_name for shard in self._feed.unfinished)
            raise CaptureError(
                f"{self._job.engine} answered all requests, but {names} did not appear for "
                f"{WRITE_SECONDS:.0f} s"
            )
        time.sleep(POLL_SECONDS)


def _load(config: RunConfig, job: CaptureJob, arguments: dict[str, Any]) -> Transport:
    port, started = config.capture.sglang_port, time.monotonic()
    try:
        if port is None:
            engine: Transport = InProcess(arguments)
        else:
            engine = HttpServer(arguments, port, config.capture.load_timeout_minutes * 60)
    except Exception as error:
        job.raise_failure()
        if isinstance(error, Eagle3Error):
            raise
        raise CaptureError(
            f"SGLang could not load {arguments['model_path']} for capture ({type(error).__name__}: {error})",
            remedy="the first error in the log says why",
        ) from error
    logger.info("loaded %s in SGLang in %.1f s", arguments["model_path"], time.monotonic() - started)
    return engine
