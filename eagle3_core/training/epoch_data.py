"""What an epoch's data cost the trainer: time waited, and bytes by where they came from."""

from __future__ import annotations

import time
from dataclasses import replace

from pydantic import ByteSize

from eagle3_core.store.samples import SampleSource


class EpochData:
    """What this epoch's data cost: the trainer's time and bytes, since the epoch began or was resumed.

    Attributes:
        waited_seconds: time that the trainer has waited for packs.
    """

    def __init__(self, source: SampleSource) -> None:
        self._source, self._before = source, replace(source.counts)
        self._began = time.time()
        self.waited_seconds = 0.0

    def begin_epoch(self) -> None:
        """Count from here; a cache keeps what was read since the epoch before began."""
        self._source.keep_from(self._began)
        self._began, self._before, self.waited_seconds = time.time(), replace(self._source.counts), 0.0

    def figures(self) -> dict[str, float]:
        """Seconds and bytes, by name."""
        counts = self._source.counts
        return {
            "data_wait_seconds": round(self.waited_seconds, 3),
            "bytes_from_store": float(counts.from_origin - self._before.from_origin),
            "bytes_from_cache": float(counts.from_cache - self._before.from_cache),
        }

    def line(self) -> str:
        """The same for the log, and what turned out damaged."""
        figures, counts = self.figures(), self._source.counts
        stored, cached = (
            ByteSize(int(figures[name])).human_readable(decimal=True)
            for name in ("bytes_from_store", "bytes_from_cache")
        )
        damaged = counts.num_damaged - self._before.num_damaged
        again = f"; {damaged} samples were damaged and read again" if damaged else ""
        read = f"{stored} from the store, {cached} from the cache"
        return f"waited {self.waited_seconds:.1f} s for data: {read}{again}"
