"""Reserves space for a run while its stages work, and says in its record where one waits for space."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from eagle3_core.config import RunConfig, Stage
from eagle3_core.contracts import ProgressEvent
from eagle3_core.errors import Eagle3Error, HostError
from eagle3_core.estimate.run import RunEstimate
from eagle3_core.estimate.space import SpaceItem, peak_bytes
from eagle3_core.host.run_folder import RunFolder
from eagle3_core.store.disk import DiskGuard, unguarded
from eagle3_core.store.reserve import Reservations
from eagle3_core.store.tree import folder_bytes

UPDATE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class RunSpace:
    """The space of one run, seen from one of its stages.

    Args:
        config: the run's.
        folder: its folder.
        stage: that works.
        on_progress: gets the stage's progress.
        on_tick: called at least every second, also while the stage waits for space; may raise.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        stage: Stage,
        on_progress: Callable[[ProgressEvent], None] | None,
        on_tick: Callable[[], None] | None,
    ) -> None:
        self._config, self._folder, self._stage = config, folder, stage
        self._on_progress, self._on_tick = on_progress, on_tick
        self._reservations = Reservations(config.limits.reservations)
        self._items: dict[str, tuple[SpaceItem, ...]] = {}
        self._before: dict[tuple[str, ...], int] = {}
        self._last_update = 0.0
        self._is_paused = False
        self.guard = DiskGuard(config.limits, folder.run_id, self._waits, on_tick)

    def reserve(self, estimate: RunEstimate) -> None:
        """Reserve what the estimate says; a folder that cannot be written costs only the reservation."""
        self._items = {one.key: one.items for one in estimate.file_systems}
        for items in self._items.values():
            self._before |= {self._places(item): self._present(item) for item in items}
        self._update()

    def progress(self, event: ProgressEvent) -> None:
        """Pass progress on; the record says when work waits for space, and when it goes on."""
        if event.is_paused != self._is_paused:
            self._is_paused = event.is_paused
            state, message = ("paused", event.message) if event.is_paused else ("running", "")
            with contextlib.suppress(Eagle3Error), unguarded():
                self._folder.update_stage(self._stage, state=state, message=message)
        if self._on_progress:
            self._on_progress(event)

    def _waits(self, reason: str | None) -> None:
        """This process itself waits for space, or goes on."""
        paused, message = reason is not None, reason or ""
        event = ProgressEvent(
            step=self._stage, done=0, total=None, unit="", message=message, is_paused=paused
        )
        self.progress(event)

    def tick(self) -> None:
        """Keep the reservation up to date: what is on the disk already is not counted again."""
        if self._items and time.monotonic() - self._last_update > UPDATE_SECONDS:
            self._update()
        if self._on_tick:
            self._on_tick()

    def _update(self) -> None:
        self._last_update = time.monotonic()
        needs = {key: self._needs(items) for key, items in self._items.items()}
        try:
            self._reservations.reserve(self._folder.run_id, needs)
        except HostError as error:
            logger.warning("other runs cannot see what this one has yet to write: %s", error)
            self._items = {}

    def _needs(self, items: tuple[SpaceItem, ...]) -> dict[str, int]:
        """What is kept by item, and what is there for a while only at its most."""
        left = [self._left(item) for item in items]
        needs: dict[str, int] = {}
        for item in left:
            needs[item.what] = needs.get(item.what, 0) + item.bytes
        return needs | {"for a while": peak_bytes(left) - sum(item.bytes for item in left)}

    def _left(self, item: SpaceItem) -> SpaceItem:
        if item.stage != self._stage:
            return item
        written = self._present(item) - self._before[self._places(item)]
        return item.model_copy(
            update={
                "bytes": max(0, item.bytes - written),
                "peak_bytes": max(0, item.peak_bytes - written),
            }
        )

    def _places(self, item: SpaceItem) -> tuple[str, ...]:
        """The folders in which an item lies: shards are written beside the capture first."""
        if not item.what.startswith("capture/"):
            return (item.path,)
        return (item.path, str(self._config.store_path / "staging" / Path(item.path).name))

    def _present(self, item: SpaceItem) -> int:
        if item.stage != self._stage:
            return 0
        return sum(folder_bytes(Path(place)) for place in self._places(item))


def release_space(config: RunConfig, run_id: str) -> None:
    """The run has ended: it will write no more."""
    Reservations(config.limits.reservations).release(run_id)
