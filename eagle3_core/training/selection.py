"""Decides by held-out acceptance which weights are kept and when training stops, and which files may go.

Pure functions over what has been measured and what lies in a folder; `loop` and `checkpoint` act on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

RESUMABLE_FILES, WEIGHTS_FILES = "resume-*.pt", "best-*.safetensors"
"""Names of the files that a resume folder owns; nothing else in it is ever removed."""


@dataclass(frozen=True)
class Entry:
    """One resumable checkpoint as the pointer names it.

    Attributes:
        step: optimizer steps done.
        file: the state's.
        files: name and hash of all that a resume needs, the state and the best weights so far.
    """

    step: int
    file: str
    files: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {"step": self.step, "file": self.file, "files": dict(self.files)}


def best_evaluations(lengths: Sequence[float], keep: int) -> list[int]:
    """Indices of the `keep` greatest acceptance lengths, the best first; of equal ones the earlier."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))[:keep]


def evaluations_without_gain(lengths: Sequence[float], min_gain: float) -> int:
    """Evaluations since the last one that raised the best acceptance length by `min_gain`.

    Lengths 2.00, 2.05, 2.08, 2.11 and a gain of 0.1: only the last counts (against 2.00), so 0; without it 2.
    """
    reference, since = float("-inf"), 0
    for length in lengths:
        if length > reference and length - reference >= min_gain:
            reference, since = length, 0
        else:
            since += 1
    return since


def should_stop(lengths: Sequence[float], patience: int | None, min_gain: float) -> bool:
    """Whether held-out acceptance has stood still for `patience` evaluations; never where that is None."""
    return patience is not None and evaluations_without_gain(lengths, min_gain) >= patience


def with_newest(entries: Sequence[Entry], newest: Entry, keep_last: int) -> list[Entry]:
    """The entries of the next pointer, newest first; an entry of the same step is replaced."""
    others = [entry for entry in entries if entry.step != newest.step]
    return [newest, *others][:keep_last]


def removable(names: Iterable[str], entries: Iterable[Entry], keep: Iterable[str] = ()) -> list[str]:
    """Files of a resume folder that no entry needs.

    Args:
        names: of all files that lie there.
        entries: of the pointer that has been written.
        keep: further files that stay.
    """
    needed = {name for entry in entries for name in entry.files} | set(keep)
    owned = (
        name for name in names if any(fnmatch(name, pattern) for pattern in (RESUMABLE_FILES, WEIGHTS_FILES))
    )
    return sorted(name for name in owned if name not in needed)
