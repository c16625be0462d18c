"""What a driver sends to its engine next; imports no engine.

A driver asks for a shard when its engine is about to run dry, not earlier, so that engines that share a
queue end together. Samples of a shard are sent in order, but those that may have killed an engine go first,
one at a time with nothing else in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.job import (
    ASK_AGAIN_SECONDS,
    MAX_SHARDS_IN_FLIGHT,
    CaptureJob,
    Later,
    iter_take,
)
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import PlannedShard

PENDING_BATCHES = 4
"""Another shard is taken when fewer tokens than this many engine steps are waiting or being computed."""

OnTokens = Callable[[int], None]
Take = Callable[[], PlannedShard | Later | None]
Ticket = TypeVar("Ticket", bound=Hashable)
"""What an engine calls a request."""


class SampleFeed(Generic[Ticket]):
    """The shards and samples of one driver.

    Args:
        job: the session's.
        samples: all samples of the dataset, in order.
        take: gives the next shard, `LATER` while none may be begun, or None when there is none left; by
            default the job's, in order.
        step_tokens: what the engine computes in one step.
        most_requests: in flight at once; None leaves that to the engine.
    """

    def __init__(
        self,
        job: CaptureJob,
        samples: Sequence[Sample],
        take: Take | None,
        step_tokens: int,
        most_requests: int | None = None,
    ) -> None:
        self._job, self._samples = job, samples
        self._take = take or iter_take(job.shards)
        self._low_water, self._most_requests = PENDING_BATCHES * step_tokens, most_requests
        self._alone = set(job.alone)
        self._waiting: deque[Sample] = deque()
        self._has_more = True
        self._ask_after = 0.0
        self.in_flight: dict[Ticket, Sample] = {}
        self.unfinished: list[PlannedShard] = []

    @property
    def is_done(self) -> bool:
        """No shard is left to ask for, and every one that was taken is written."""
        return not self._has_more and not self.unfinished

    def refill(self) -> None:
        """Take shards until the engine has enough to do; sleep where it has nothing and must ask later."""
        while self._has_more and self._has_room():
            if (early := self._ask_after - time.monotonic()) > 0:
                if self.unfinished:
                    return
                time.sleep(early)
            shard = self._take()
            if shard is None:
                self._has_more = False
                return
            if isinstance(shard, Later):
                self._ask_after = time.monotonic() + ASK_AGAIN_SECONDS
                return
            samples = self._job.samples_of(shard, self._samples)
            self._waiting.extend(sorted(samples, key=lambda sample: sample.key not in self._alone))
            self.unfinished.append(shard)

    def to_send(self) -> Iterator[Sample]:
        """Samples to send now; each must be named in `sent` before the next one is asked for."""
        while self._waiting and self._may_send(self._waiting[0]):
            yield self._waiting.popleft()

    def sent(self, ticket: Ticket, sample: Sample) -> None:
        """The engine has got a sample."""
        self.in_flight[ticket] = sample

    def answered(self, ticket: Ticket) -> Sample:
        """The engine has answered a request; returns its sample."""
        return self.in_flight.pop(ticket)

    def finished(self) -> list[tuple[PlannedShard, FileEntry]]:
        """Shards that have been written since the last call, with their manifest entries."""
        entries = [(shard, self._job.finished_entry(shard)) for shard in self.unfinished]
        found = [(shard, entry) for shard, entry in entries if entry is not None]
        for shard, _ in found:
            self.unfinished.remove(shard)
        return found

    def _has_room(self) -> bool:
        pending = sum(map(len, self._waiting)) + sum(map(len, self.in_flight.values()))
        return len(self.unfinished) < MAX_SHARDS_IN_FLIGHT and pending < self._low_water

    def _may_send(self, sample: Sample) -> bool:
        if not self.in_flight:
            return True
        if self._most_requests is not None and len(self.in_flight) >= self._most_requests:
            return False
        return not any(one.key in self._alone for one in (sample, *self.in_flight.values()))
