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
    """A coroutine in the event loop's thread, from `begin` on; `result` waits for it, and cancels it if
    interrupted.

    Who must be able to cancel it keeps it before it begins: an interruption may come in between.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop, self._coroutine = loop, coroutine
        self._task: asyncio.Task[T] | None = None
        self._is_cancelled = False
        self._ended = threading.Event()

    def begin(self) -> None:
        """Run it."""
        self._loop.call_soon_threadsafe(self._begin)

    def result(self) -> T:
        """What the coroutine returned or raised."""
        try:
            while not self._ended.wait(WAKE_SECONDS):
                pass
        except BaseException:
            self.cancel()
            self._ended.wait(CANCEL_SECONDS)
            raise
        if self._task is None or self._task.cancelled():
            raise ObjectStoreError("a request to the object store was cancelled", remedy="run it again")
        return self._task.result()

    def cancel(self) -> None:
        """Ask the coroutine to end; it still cleans up after itself."""
        self._loop.call_soon_threadsafe(self._cancel)

    def wait(self) -> None:
        """Wait for the end of a cancelled coroutine, which cleans up after itself, but not for ever."""
        self._ended.wait(CANCEL_SECONDS)

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` in the loop's thread as soon as the coroutine has ended."""
        self._loop.call_soon_threadsafe(
            lambda: self._task.add_done_callback(lambda _: then()) if self._task else None
        )

    def _begin(self) -> None:
        if self._is_cancelled:
            return
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
        else:  # it has not begun and will not
            self._coroutine.close()
            self._ended.set()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # mark it as seen: whoever waits gets it from `result`
        self._ended.set()
