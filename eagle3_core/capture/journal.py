"""Which samples an engine is computing, on disk: so that what a killed process had begun can be named."""

from __future__ import annotations

import json
import os
from pathlib import Path

from eagle3_core.store.disk import is_no_space

JOURNAL_NAME = "in_flight.log"


class Journal:
    """Which samples an engine has begun and not finished, on disk: it survives a process that is killed.

    One line an event, `+` or `-` and the key as JSON, each written in one call. A full disk loses lines: then
    it may name samples too many or too few, which costs time and no sample.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def started(self, key: str) -> None:
        """The engine is about to compute this sample."""
        self._append(f"+{json.dumps(key)}\n")

    def finished(self, key: str) -> None:
        """The engine has computed this sample."""
        self._append(f"-{json.dumps(key)}\n")

    def in_flight(self) -> list[str]:
        """Samples that were begun and not finished, in order."""
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        begun: dict[str, None] = {}
        for line in lines:
            try:
                key = json.loads(line[1:])
            except ValueError:  # a full disk took a part of it
                continue
            if line.startswith("+"):
                begun[key] = None
            else:
                begun.pop(key, None)
        return list(begun)

    def has_finished_any(self) -> bool:
        """Whether the engine has computed a sample at all."""
        try:
            return any(line.startswith("-") for line in self._path.read_text().splitlines())
        except FileNotFoundError:
            return False

    def _append(self, line: str) -> None:
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(self._descriptor, line.encode())
        except OSError as error:
            if not is_no_space(error):
                raise
