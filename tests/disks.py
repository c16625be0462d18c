"""Small disks that really become full: memory file systems, where this process may mount them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, num_bytes: int) -> None:
        """Make it larger or smaller; what is on it stays."""
        _mount("-o", f"remount,size={num_bytes}", str(self.path))

    def fill(self) -> None:
        """Take all the space that is left; `free` gives it back."""
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 65536)

    def free(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.path / "filler"

    def make_read_only(self, read_only: bool = True) -> None:
        """Refuse every write, or allow them again."""
        _mount("-o", f"remount,{'ro' if read_only else 'rw'}", str(self.path))


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Mount a disk of `num_bytes`; the test is skipped where that is not permitted."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        _mount("-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        pytest.skip(f"no small disk can be mounted here: {reason}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, text=True)
