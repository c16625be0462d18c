"""Room on the disk for the shards of a capture: none is begun that does not fit beside those in work.

Where the capture goes into a bucket, finished shards lie here until they are uploaded; none is begun while
too many of them wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.capture.job import MAX_SHARDS_IN_FLIGHT, CaptureJob
from eagle3_core.report.figures import format_bytes
from eagle3_core.store.dataset import Sample
from eagle3_core.store.disk import DiskGuard
from eagle3_core.store.shards import PlannedShard, shard_file_bytes
from eagle3_core.store.tree import folder_bytes

ENTRY_BYTES = 4096
"""Of a shard's manifest entry and claim, each a file of its own."""


BACKLOG_REPORT_SECONDS = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backlog:
    """Finished shards that wait to be uploaded.

    Attributes:
        folder: where they lie until then.
        limit: bytes of them that may wait.
    """

    folder: Path
    limit: int

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait now."""
        total = 0
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(FileNotFoundError):  # it has just been uploaded
                total += path.stat().st_size
        return total


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
        backlog: of a store in a bucket; None where finished shards stay on this disk.
    """

    def __init__(
        self,
        guard: DiskGuard,
        sessions: Path,
        prefix: str,
        job: CaptureJob,
        samples: Sequence[Sample],
        backlog: Backlog | None = None,
    ) -> None:
        self.guard, self._sessions, self._prefix = guard, sessions, prefix
        self._job, self._samples = job, samples
        self._sizes: dict[int, int] = {}
        self._backlog, self._backlog_told = backlog, 0.0

    def file_bytes(self, shard: PlannedShard) -> int:
        """Bytes that a shard adds to the disk."""
        if shard.index not in self._sizes:
            samples = self._samples[shard.start : shard.end]
            self._sizes[shard.index] = shard_file_bytes(samples, self._job.layout) + ENTRY_BYTES
        return self._sizes[shard.index]

    def may_begin(self, shard: PlannedShard, in_work: Sequence[PlannedShard]) -> bool:
        """Whether a shard fits into the backlog, and above the reserve beside what others have yet to write.

        Raises:
            DiskFullError: it does not fit on the disk, and the policy is to fail, or it has not for too long.
        """
        if self._is_backed_up(shard):
            return False
        written = sum(folder_bytes(folder) for folder in self._sessions.glob(f"{self._prefix}*"))
        unwritten = max(0, sum(map(self.file_bytes, in_work)) - written)
        return self.guard.has_room(self._sessions, self.file_bytes(shard) + unwritten, shard.file_name)

    def shortage(self, shards: Sequence[PlannedShard]) -> str | None:
        """Why all of these shards, or as many as lie here at once, do not fit; None if they do."""
        sizes = list(map(self.file_bytes, shards))
        needed = sum(sizes)
        if self._backlog is not None and sizes:
            needed = min(needed, self._backlog.limit + MAX_SHARDS_IN_FLIGHT * max(sizes))
        found = self.guard.shortage(self._sessions, needed)
        return str(found) if found else None

    def _is_backed_up(self, shard: PlannedShard) -> bool:
        waiting = self._backlog.waiting_bytes if self._backlog is not None else 0
        if self._backlog is None or not waiting or waiting + self.file_bytes(shard) <= self._backlog.limit:
            return False
        if time.monotonic() - self._backlog_told > BACKLOG_REPORT_SECONDS:
            self._backlog_told = time.monotonic()
            size = format_bytes(waiting)
            logger.info("%s waits until less than %s wait for their upload", shard.file_name, size)
        return True
