"""Coroutines in the event loop of another thread, for callers that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from eagle3_core.errors import ObjectStoreError

T = TypeVar("T")
CANCEL_SECONDS = 60.0
"""An interrupted caller waits this long for the coroutine to clean up after itself."""
WAKE_SECONDS = 0.5
"""A signal that another thread got is noticed after so long."""


class Call(Generic[T]):
    """A coroutine in the event loop's thread; `result` waits for it, and cancels it if interrupted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop, self._coroutine = loop, coroutine
        self._task: asyncio.Task[T] | None = None
        self._ended = threading.Event()
        loop.call_soon_threadsafe(self._begin)

    def result(self) -> T:
        """What the coroutine returned or raised."""
        try:
            while not self._ended.wait(WAKE_SECONDS):
                pass
        except BaseException:
            self.cancel()
            self._ended.wait(CANCEL_SECONDS)
            raise
        assert self._task is not None
        if self._task.cancelled():
            raise ObjectStoreError("a request to the object store was cancelled", remedy="run it again")
        return self._task.result()

    def cancel(self) -> None:
        """Ask the coroutine to end; it still cleans up after itself."""
        self._loop.call_soon_threadsafe(lambda: self._task.cancel() if self._task else None)

    def wait(self) -> None:
        """Wait for the end of a cancelled coroutine, which cleans up after itself, but not for ever."""
        self._ended.wait(CANCEL_SECONDS)

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` in the loop's thread as soon as the coroutine has ended."""
        self._loop.call_soon_threadsafe(
            lambda: self._task.add_done_callback(lambda _: then()) if self._task else None
        )

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as seen: whoever waits gets it from `result`
        self._ended.set()
