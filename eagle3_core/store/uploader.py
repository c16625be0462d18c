"""Uploads finished files in the background, with a bound on the bytes that wait for it.

add -> upload (parts side by side) -> proven -> `on_proven`, in a thread of its own -> off the backlog
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.artifacts import FileEntry
from eagle3_core.store.calls import WAKE_SECONDS, Call
from eagle3_core.store.objects import ObjectClient
from eagle3_core.store.uploads import upload


@dataclass
class _Waiting:
    entry: FileEntry
    call: Call[FileEntry]
    has_ended: bool = False


class Uploader:
    """Uploads of one artifact's files. The first error ends it and is raised by the next call.

    Args:
        client: of the bucket.
        backlog_bytes: with more bytes waiting, `add` waits; a single file may be larger.
        on_proven: gets the entries of files whose objects are proven, in a thread of the uploader; until it
            has returned they count as waiting.
    """

    def __init__(
        self, client: ObjectClient, backlog_bytes: int, on_proven: Callable[[list[FileEntry]], None]
    ) -> None:
        self._client, self._backlog, self._on_proven = client, backlog_bytes, on_proven
        self._changed = threading.Condition()
        self._waiting: dict[str, _Waiting] = {}
        self._error: BaseException | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of files that are not yet proven and recorded."""
        with self._changed:
            return sum(waiting.entry.bytes for waiting in self._waiting.values())

    def add(self, path: Path, key: str, entry: FileEntry) -> None:
        """Begin to upload a file; waits while the backlog has no room, or the same file is on its way.

        Raises:
            StoreError: an upload has failed.
        """
        with self._changed:
            self._wait(lambda: self._has_room(entry))
            call = self._client.call(upload(self._client, path, key, entry))
            waiting = self._waiting[entry.path] = _Waiting(entry, call)
            call.begin()
        call.when_ended(lambda: self._end(waiting))

    def drain(self) -> None:
        """Wait until everything is proven.

        Raises:
            StoreError: an upload has failed.
        """
        with self._changed:
            self._wait(lambda: not self._waiting)

    def close(self) -> None:
        """Cancel what is on its way and wait until it has been aborted in the bucket."""
        with self._changed:
            self._is_closing = True
            calls = [waiting.call for waiting in self._waiting.values()]
            self._changed.notify_all()
        for call in calls:
            call.cancel()
        for call in calls:
            call.wait()
        self._thread.join()

    def _has_room(self, entry: FileEntry) -> bool:
        if entry.path in self._waiting:
            return False
        bytes_there = sum(waiting.entry.bytes for waiting in self._waiting.values())
        return not self._waiting or bytes_there + entry.bytes <= self._backlog

    def _wait(self, is_true: Callable[[], bool]) -> None:
        """Wait, with the condition held, until something is true or an upload has failed; raise its error."""
        while not self._changed.wait_for(lambda: self._error is not None or is_true(), WAKE_SECONDS):
            pass
        if self._error is not None:
            raise self._error

    def _end(self, waiting: _Waiting) -> None:
        with self._changed:
            waiting.has_ended = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or bool(self._ended()))
                if self._is_closing:
                    return
                ended = self._ended()
            try:
                self._take(ended)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                for waiting in ended:
                    del self._waiting[waiting.entry.path]
                self._changed.notify_all()

    def _take(self, ended: list[_Waiting]) -> None:
        """Hand on what was proven; then raise the first error, if there is one."""
        proven: list[FileEntry] = []
        first: BaseException | None = None
        for waiting in ended:
            try:
                proven.append(waiting.call.result())
            except Exception as error:
                first = first or error
        if proven:
            self._on_proven(proven)
        if first is not None:
            raise first

    def _ended(self) -> list[_Waiting]:
        return [waiting for waiting in self._waiting.values() if waiting.has_ended]
