"""What parts of the host benchmark that run at the same time tell each other: files beside their folders."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, get_args

Signal = Literal["early-stages-over", "other-parts-over"]
"""`early-stages-over`: the part that began early leaves the GPUs alone. `other-parts-over`: it may go on."""
POLL_SECONDS = 0.2
QUIET_SECONDS = 60.0
"""How long others wait for `early-stages-over` before they measure all the same, and say so."""


def give(signal: Signal, folder: Path) -> None:
    """Tell all parts.

    Args:
        signal: see `Signal`.
        folder: in which the parts' folders lie.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / signal).touch()


def wait_for(signal: Signal, folder: Path, seconds: float) -> bool:
    """Wait until it is given; False if it is not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not (folder / signal).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def forget(folder: Path) -> None:
    """Remove what an earlier benchmark in the same folder has told."""
    for signal in get_args(Signal):
        (folder / signal).unlink(missing_ok=True)
