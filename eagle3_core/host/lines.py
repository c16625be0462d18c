"""From a step's raw output to log lines and progress events; pure."""

from __future__ import annotations

import logging
import re
from typing import NamedTuple

from pydantic import ValidationError

from eagle3_core.contracts import ProgressEvent
from eagle3_core.step import PROGRESS_PREFIX

MAX_LINE_BYTES = 16384
LEVELS = {
    "C": logging.CRITICAL,
    "F": logging.CRITICAL,
    "E": logging.ERROR,
    "W": logging.WARNING,
    "D": logging.DEBUG,
}
ANSI_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Parsed(NamedTuple):
    """What one raw line holds: a log line, a progress event, both or neither."""

    text: str | None
    event: ProgressEvent | None


class LineSplitter:
    """Cuts a byte stream into lines.

    A progress bar that redraws itself with carriage returns leaves its last frame only, and a line longer
    than `MAX_LINE_BYTES` is cut into several.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, block: bytes) -> list[str]:
        """The lines that `block` completes."""
        *complete, rest = (self._rest + block).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            frame = rest.rpartition(b"\r")[2]
            if len(frame) > MAX_LINE_BYTES:
                complete.append(frame)
                frame = b""
            rest = frame
        self._rest = rest
        return [text for raw in complete for text in _texts(raw)]

    def end(self) -> list[str]:
        """What is left when the stream has ended."""
        rest, self._rest = self._rest, b""
        return _texts(rest) if rest else []


def parse_line(line: str) -> Parsed:
    """Tell progress from log text; text that a progress report was printed behind is kept."""
    text, prefix, document = line.partition(PROGRESS_PREFIX)
    if not prefix:
        return Parsed(line, None)
    try:
        event = ProgressEvent.model_validate_json(document)
    except ValidationError:
        return Parsed(line, None)
    return Parsed(text or None, event)


def guess_level(line: str) -> int:
    """The `logging` level that a line of any tool's output stands for."""
    found = re.search(r"\b(CRITICAL|FATAL|ERROR|WARNING|WARN|DEBUG)\b|\d \b([CEWD])\b ", line[:120])
    if found:
        word = (found.group(1) or found.group(2))[0]
        return LEVELS[word]
    is_failure = line.startswith("Traceback (most recent") or re.match(r"step \w+ failed:", line)
    return logging.ERROR if is_failure else logging.INFO


def _texts(raw: bytes) -> list[str]:
    frames = [frame for frame in raw.split(b"\r") if frame]
    last = frames[-1] if frames else b""
    overwritten = b"\r" in raw.rstrip(b"\r")
    pieces = [last[at : at + MAX_LINE_BYTES] for at in range(0, len(last), MAX_LINE_BYTES)] or [b""]
    texts = [ANSI_CODE.sub("", piece.decode("utf-8", "replace")) for piece in pieces]
    if overwritten and PROGRESS_PREFIX in texts[0]:
        texts[0] = PROGRESS_PREFIX + texts[0].partition(PROGRESS_PREFIX)[2]
    return texts
