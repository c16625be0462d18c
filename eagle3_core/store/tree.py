"""What lies below a folder in which other processes write and remove meanwhile.

`Path.rglob` fails where a folder goes while it looks into it (before Python 3.13).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, at any depth; none where it is not there."""
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 where it is not there."""
    total = 0
    for path in files_below(folder):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total
