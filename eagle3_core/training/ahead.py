"""Reads packs in a thread, ahead of whoever works on them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")
READ_AHEAD_PACKS = 2
LEAVING_SECONDS = 10.0
SWITCH_SECONDS = 2e-4
"""Python hands its lock from thread to thread after so long, else after 5 ms: the reading thread would hold
up whoever starts kernels on a GPU."""


class ReadAhead(Generic[Item]):
    """Iterates over packs that a thread reads ahead; use as a context manager.

    Args:
        items: packs, or what holds one each; taken in the thread.

    Attributes:
        waited_seconds: time that the consumer has waited for packs.
    """

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._queue: queue.Queue[Item | BaseException | None] = queue.Queue(READ_AHEAD_PACKS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pack-reader", daemon=True)
        self._switch_seconds = sys.getswitchinterval()
        self.waited_seconds = 0.0

    def __enter__(self) -> Iterator[Item]:
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()
        return self._taken()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        sys.setswitchinterval(self._switch_seconds)
        self._thread.join(LEAVING_SECONDS)  # it may be waiting for a store that cannot be reached

    def _taken(self) -> Iterator[Item]:
        while (item := self._next()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def _next(self) -> Item | BaseException | None:
        started = time.monotonic()
        item = self._queue.get()
        self.waited_seconds += time.monotonic() - started
        return item

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Item | BaseException | None) -> bool:
        """Hand over an item; False if nobody waits for it any more."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
