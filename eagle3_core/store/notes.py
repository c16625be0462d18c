"""Small files beside the artifacts of a store: each whole or absent, with an age by the store's own clock."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path
from typing import Protocol

from eagle3_core.errors import StoreError
from eagle3_core.store.files import TEMPORARY_PREFIX, write_atomic


class Notes(Protocol):
    """Named texts in one place of a store."""

    def write(self, name: str, text: str) -> None:
        """Replace a note in one step."""
        ...

    def read(self, name: str) -> str | None:
        """Its text, or None."""
        ...

    def ages(self) -> dict[str, float]:
        """Names of all notes, and the seconds since each was written or touched."""
        ...

    def touch(self, name: str) -> None:
        """Make a note young again, if it is there."""
        ...

    def remove(self, name: str) -> None:
        """Remove a note, if it is there."""
        ...


class FolderNotes:
    """Notes as files of one folder; times are the file system's, so that clocks of hosts do not matter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, text: str) -> None:
        """Replace a note in one step."""
        write_atomic(self._folder / name, text)

    def read(self, name: str) -> str | None:
        """Its text, or None.

        Raises:
            StoreError: it cannot be read.
        """
        try:
            return (self._folder / name).read_text(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"the note {self._folder / name} cannot be read ({error.strerror})") from error

    def ages(self) -> dict[str, float]:
        """Names of all notes, and the seconds since each was written or touched."""
        times: dict[str, float] = {}
        for path in sorted(self._folder.glob("*")):
            with contextlib.suppress(FileNotFoundError):
                if not path.name.startswith(TEMPORARY_PREFIX):
                    times[path.name] = path.stat().st_mtime
        if not times:
            return {}
        now = self._now()
        return {name: max(0.0, now - time) for name, time in times.items()}

    def touch(self, name: str) -> None:
        """Make a note young again; one that is gone stays so."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._folder / name)

    def remove(self, name: str) -> None:
        """Remove a note, if it is there."""
        (self._folder / name).unlink(missing_ok=True)

    def _now(self) -> float:
        clock = self._folder / f"{TEMPORARY_PREFIX}clock-{uuid.uuid4().hex}"
        try:
            clock.touch()
            return clock.stat().st_mtime
        except OSError:  # a folder that can only be read: this host's clock must do
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                clock.unlink(missing_ok=True)
