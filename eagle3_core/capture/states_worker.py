"""Copies captured states out of the engine's cache, on the CPU or from a GPU; imports no engine.

Legend: S tokens of a sample, L captured ids, H hidden size, T tokens of a cache block.

From a GPU the rows are gathered and copied on a stream of their own into page-locked memory, after what the
engine had queued when the step began in which it learns of a finished request, and beside that step's own
work; an event tells when the copy is done, and only then are the blocks given back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3_core.capture.assemble import ShardAssembler
from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.request_log import FinishedRequest
from eagle3_core.errors import CaptureError
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.shards import CapturedSample

logger = logging.getLogger(__name__)


class StatesWorker:
    """Copies rows [S, L, H] out of the cache and passes them on to the assembler.

    Args:
        job: what is captured.
        cache: the cache of captured states as [blocks, T, L, H].

    After a failure, which is recorded for the driver, it copies nothing more but still names every request
    as finished, so that the engine does not wait for ever.
    """

    def __init__(self, job: CaptureJob, cache: torch.Tensor) -> None:
        if str(cache.dtype) != f"torch.{job.layout.dtype}":
            raise CaptureError(f"vLLM holds captured states as {cache.dtype}", expected=job.layout.dtype)
        self._job, self._cache = job, words(cache)
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None
        samples = read_dataset(Path(job.dataset_folder))
        self._assembler = ShardAssembler(job, samples, pin_memory=cache.is_cuda)
        self._copies: list[tuple[FinishedRequest, torch.cuda.Event | None]] = []
        self._failed = False
        self._before_step: torch.cuda.Event | None = None

    def begin_step(self) -> None:
        """Called before a step's work is queued: what has finished by then may be copied beside it."""
        if self._stream is not None:
            self._before_step = torch.cuda.current_stream(self._cache.device).record_event()

    def step(self, finished: Sequence[FinishedRequest], flush: Sequence[int] | None = None) -> set[str]:
        """Handle one engine step; returns the ids of requests whose blocks may be freed.

        Args:
            finished: requests that have finished since the last step.
            flush: nothing else is in flight: wait for all copies; of these shards no sample may be missing.
        """
        try:
            if not self._failed:
                for request in finished:
                    copied = self._begin_copy(request)
                    self._copies.append((request, copied))
                    self._assembler.filled(request.sample, copied)
                done = self._confirm(wait=flush is not None)
                if flush is not None:
                    self._assembler.check_whole(flush)
                return done
        except Exception as error:
            logger.exception("capture failed in the engine's worker")
            self._job.record_failure(error)
            self._failed = True
        done = {request.request_id for request, _ in self._copies}
        self._copies.clear()
        return done | {request.request_id for request in finished}

    def close(self) -> None:
        """End the writing thread."""
        self._assembler.close()

    def _begin_copy(self, request: FinishedRequest) -> torch.cuda.Event | None:
        num_tokens, capacity = len(request.token_ids), len(request.block_ids) * self._cache.shape[1]
        place = self._assembler.place(request.sample, request.token_ids, min(request.num_rows, capacity))
        if self._stream is None:
            self._fill(place, torch.tensor(request.block_ids), num_tokens)
            return None
        assert self._before_step is not None
        self._stream.wait_event(self._before_step)
        with torch.cuda.stream(self._stream):
            self._fill(place, torch.tensor(request.block_ids, pin_memory=True), num_tokens)
            return self._stream.record_event(torch.cuda.Event(blocking=True))

    def _fill(self, place: CapturedSample, blocks: torch.Tensor, num_tokens: int) -> None:
        """Copy the rows of a sample out of its blocks; on a GPU the copies are only begun."""
        device, (size, num_aux) = self._cache.device, (self._cache.shape[1], place.aux_states.shape[1])
        blocks = blocks.to(device, non_blocking=True)
        aux = self._cache[:, :, :num_aux][blocks].flatten(0, 1)[:num_tokens]
        words(place.aux_states).copy_(aux, non_blocking=True)
        if len(place.final_rows):
            rows = place.final_rows.to(device, non_blocking=True)
            final = self._cache[:, :, num_aux][blocks[rows // size], rows % size]
            words(place.final_states).copy_(final, non_blocking=True)

    def _confirm(self, wait: bool) -> set[str]:
        done: set[str] = set()
        waiting = []
        for request, event in self._copies:
            if event is not None and wait:
                event.synchronize()
            if event is None or event.query():
                done.add(request.request_id)
            else:
                waiting.append((request, event))
        self._copies = waiting
        return done


def words(states: torch.Tensor) -> torch.Tensor:
    """The same bytes as elements of eight bytes where rows allow: a GPU gathers fewer of them sooner."""
    whole = states.shape[-1] * states.element_size() % 8 == 0
    return states.view(torch.int64) if whole else states
