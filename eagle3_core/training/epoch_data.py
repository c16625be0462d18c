"""What an epoch's data cost the trainer: time waited, and bytes by where they came from."""

from __future__ import annotations

import time
from dataclasses import replace

from eagle3_core.report.figures import format_bytes
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
        """Seconds and gigabytes, by name."""
        from_store, from_cache = self._bytes()
        return {
            "data_wait_seconds": round(self.waited_seconds, 3),
            "gb_from_store": from_store / 1e9,
            "gb_from_cache": from_cache / 1e9,
        }

    def line(self) -> str:
        """The same for the log, and what turned out damaged."""
        stored, cached = (format_bytes(size) for size in self._bytes())
        damaged = self._source.counts.num_damaged - self._before.num_damaged
        again = f"; {damaged} samples were damaged and read again" if damaged else ""
        read = f"{stored} from the store, {cached} from the cache"
        return f"waited {self.waited_seconds:.1f} s for data: {read}{again}"

    def _bytes(self) -> tuple[int, int]:
        counts, before = self._source.counts, self._before
        return counts.from_origin - before.from_origin, counts.from_cache - before.from_cache
