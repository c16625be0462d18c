"""Room on the disk for the shards of a capture: none is begun that does not fit beside those in work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from eagle3_core.capture.job import CaptureJob
from eagle3_core.store.dataset import Sample
from eagle3_core.store.disk import DiskGuard, folder_bytes
from eagle3_core.store.shards import PlannedShard, shard_file_bytes

ENTRY_BYTES = 4096
"""Of a shard's manifest entry and claim, each a file of its own."""


class Pauses:
    """Why work is paused, of all that may pause it; the first reason is told.

    Args:
        tell: gets a reason, or None when nothing is paused any more.
    """

    def __init__(self, tell: Callable[[str | None], None]) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self._reasons: dict[Hashable, str] = {}

    def set(self, who: Hashable, reason: str | None) -> None:
        """One of them has a reason, or none any more."""
        with self._lock:
            if reason is None and who not in self._reasons:
                return
            if reason is None:
                del self._reasons[who]
            else:
                self._reasons[who] = reason
            self._tell(next(iter(self._reasons.values()), None))


class ShardRoom:
    """Asks the guard for each shard before it is begun.

    Args:
        guard: of this step.
        sessions: folder in which sessions write.
        prefix: begins the names of this process's sessions.
        job: of the capture.
        samples: all samples of the dataset, in order.
    """

    def __init__(
        self, guard: DiskGuard, sessions: Path, prefix: str, job: CaptureJob, samples: Sequence[Sample]
    ) -> None:
        self.guard, self._sessions, self._prefix = guard, sessions, prefix
        self._job, self._samples = job, samples
        self._sizes: dict[int, int] = {}

    def file_bytes(self, shard: PlannedShard) -> int:
        """Bytes that a shard adds to the disk."""
        if shard.index not in self._sizes:
            samples = self._samples[shard.start : shard.end]
            self._sizes[shard.index] = shard_file_bytes(samples, self._job.layout) + ENTRY_BYTES
        return self._sizes[shard.index]

    def may_begin(self, shard: PlannedShard, in_work: Sequence[PlannedShard]) -> bool:
        """Whether a shard fits above the reserve beside what others in work have yet to write.

        Raises:
            DiskFullError: it does not, and the policy is to fail, or it has not for too long.
        """
        written = sum(folder_bytes(folder) for folder in self._sessions.glob(f"{self._prefix}*"))
        unwritten = max(0, sum(map(self.file_bytes, in_work)) - written)
        return self.guard.has_room(self._sessions, self.file_bytes(shard) + unwritten, shard.file_name)

    def shortage(self, shards: Sequence[PlannedShard]) -> str | None:
        """Why all of these shards do not fit, or None."""
        found = self.guard.shortage(self._sessions, sum(map(self.file_bytes, shards)))
        return str(found) if found else None
