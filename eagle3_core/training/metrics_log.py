"""`metrics.jsonl`: what training measured, one JSON object a line.

Records have a `type`: `step` (one optimizer step that was taken), `skipped` (one that was left out, with the
reason) and `evaluation` (a look at the held-out split). Every record has `step` and `time`, Unix seconds.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from eagle3_core.contracts import METRICS_FILE
from eagle3_core.errors import StoreError
from eagle3_core.store.disk import patiently
from eagle3_core.store.files import append, write_atomic


class Mirror(Protocol):
    """Something that shows the same records in another form."""

    def restart(self, records: Iterable[dict[str, Any]]) -> None:
        """Forget everything, and show these."""

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Show these too."""


class MetricsLog:
    """Writes the file; after a resume it goes on where the checkpoint left it, and so does its mirror.

    Args:
        folder: of the file.
        mirror: gets every record that the file has, and none twice.
    """

    def __init__(self, folder: Path, mirror: Mirror | None = None) -> None:
        self.path = folder / METRICS_FILE
        self._handle = io.FileIO(self.path, "a")
        self._mirror = mirror

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records; they reach the file at once."""
        listed = list(records)
        append(self._handle, "".join(json.dumps(record) + "\n" for record in listed).encode(), self.path)
        if self._mirror is not None:
            self._mirror.add(listed)

    def sync(self) -> int:
        """Make what was written durable; returns the length in bytes."""
        patiently(lambda: os.fsync(self._handle.fileno()), self.path.parent, 0, self.path.name)
        return self._handle.seek(0, os.SEEK_END)

    def cut(self, length: int) -> None:
        """Drop what was written after a checkpoint.

        The file is replaced: a process that stood still while this one took over appends to the old one.

        Raises:
            StoreError: the file is shorter than the checkpoint says.
        """
        found = self._handle.seek(0, os.SEEK_END)
        if found < length:
            raise StoreError(
                f"{self.path} has {found:,} bytes, the checkpoint was made at {length:,}",
                remedy=f"remove {self.path.parent} to train from the start",
            )
        with self.path.open("rb") as handle:
            kept = handle.read(length)
        write_atomic(self.path, kept)
        self._handle.close()
        self._handle = io.FileIO(self.path, "a")
        if self._mirror is not None:
            self._mirror.restart(read_records(self.path))

    def close(self) -> None:
        """Close the file; nothing may be added after."""
        self._handle.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file; a last line that is being written is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line]
