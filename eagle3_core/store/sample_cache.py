"""A bounded cache of samples on the local disk, shared by the processes of a host.

    <folder>/
      .lock           held while room is made or taken and an entry gets its name; holds the bytes taken
      <hash>          the states of one sample; named by the sample's hash, so a name never means two contents
      .tmp-*          entries being written, of their final size from the start and locked by their writer

The files never take more than the limit, those being written included: room is taken under the lock before a
byte is written. What a killed process leaves is unlocked with its death, and removed by whoever makes room
next. A file system of this host is expected, not a network mount.

Training reads every sample once an epoch, each time in another order, so the entry that was read longest ago
is as likely to be needed next as any other, and with room for a tenth of the samples hardly an entry would
live until it is read again. `keep_from` therefore protects what this process's epochs have read: the first
samples stay and serve a tenth of each epoch, and only what nobody has read since then makes room, the oldest
first.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from eagle3_core.store.disk import fits
from eagle3_core.store.files import LOCK_NAME, READ_BYTES, TEMPORARY_PREFIX

BLOCK_BYTES = 4096
"""Files count in whole blocks, as a disk stores them."""
SPARE_SHARE = 16
"""Making room frees this share of the limit besides, so that the folder is not listed for every entry."""
FULL_SECONDS = 5.0
"""So long nothing larger than the room left is put into a cache that is full of protected entries."""

logger = logging.getLogger(__name__)


class SampleCache:
    """Keeps samples by their hash; safe to use from several threads and processes.

    Args:
        folder: made when the first entry is put.
        limit: bytes that the files may take; 0 keeps nothing.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.keep_from = float("inf")
        self._full_until, self._room_left = 0.0, 0

    def get(self, name: str, size: int) -> memoryview | None:
        """The content of an entry of `size` bytes, unchecked, or None."""
        if not self.limit:
            return None
        path = self.folder / name
        content = empty_block(size)
        try:
            with path.open("rb", buffering=0) as file:
                filled = 0
                while count := file.readinto(content[filled : filled + READ_BYTES]):
                    filled += count
                if filled != size or file.read(1):
                    raise OSError("the entry has another size")
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be used (%s)", path, error)
            self.drop(name)
            return None
        return content

    def put(self, name: str, content: bytes | bytearray | memoryview) -> bool:
        """Keep an entry if there is room for it; returns whether it is there now.

        A disk that is full, has only its reserve left or cannot be written to is no error: the entry is just
        not kept.
        """
        path, wanted = self.folder / name, blocks(len(content))
        is_full = time.monotonic() < self._full_until and wanted > self._room_left
        if is_full or wanted > self.limit:
            return False
        try:
            if path.exists():
                return True
            if not fits(self.folder, len(content)):
                self._full_until, self._room_left = time.monotonic() + FULL_SECONDS, 0
                return False
            with self._room(name, len(content)) as file:
                if file is None:
                    return False
                _write_all(file, content)
                with (
                    self._locked()
                ):  # or whoever lists the folder meanwhile sees the entry under neither name
                    Path(file.name).replace(path)
            return True
        except OSError as error:
            logger.warning("%s cannot be kept (%s)", path, error)
            self._full_until, self._room_left = time.monotonic() + FULL_SECONDS, 0
            return False

    def drop(self, name: str) -> None:
        """Remove an entry that turned out damaged."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)

    def bytes_taken(self) -> int:
        """Bytes that the entries take, those being written included."""
        if not self.folder.is_dir():
            return 0
        with self._locked():
            return sum(blocks(status.st_size) for _, status in _files(self.folder))

    @contextlib.contextmanager
    def _room(self, name: str, size: int) -> Iterator[IO[bytes] | None]:
        """A temporary file of `size` bytes whose room is taken, or None where there is none.

        The file is removed unless the caller has renamed it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{TEMPORARY_PREFIX}{name}.{os.getpid()}.{threading.get_ident()}"
        with self._locked() as ledger:
            taken = _read_ledger(ledger)
            if taken is None or taken + blocks(size) > self.limit:
                taken = self._make_room(blocks(size))
            fits = taken + blocks(size) <= self.limit
            if fits:
                file = path.open("wb", buffering=0)
                fcntl.flock(file, fcntl.LOCK_EX)
                file.truncate(size)
            _write_ledger(ledger, taken + (blocks(size) if fits else 0))
        if not fits:
            self._full_until, self._room_left = time.monotonic() + FULL_SECONDS, self.limit - taken
            yield None
            return
        try:
            with file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        # The kernel gives the lock back when its holder ends, however it ends.
        descriptor = os.open(self.folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_room(self, wanted: int) -> int:
        """Remove what may go until `wanted` bytes and some spare fit; returns the bytes that are taken."""
        taken, removable = 0, []
        for path, status in _files(self.folder):
            if path.name.startswith(TEMPORARY_PREFIX) and _is_abandoned(path):
                path.unlink(missing_ok=True)
                continue
            size = blocks(status.st_size)
            taken += size
            if status.st_mtime < self.keep_from and not path.name.startswith(TEMPORARY_PREFIX):
                removable.append((status.st_mtime, path, size))
        goal = self.limit - max(wanted, self.limit // SPARE_SHARE)
        for _, path, size in sorted(removable):
            if taken <= goal:
                break
            path.unlink(missing_ok=True)
            taken -= size
        return taken


def _write_all(file: IO[bytes], content: bytes | bytearray | memoryview) -> None:
    rest = memoryview(content)
    while len(rest):
        rest = rest[file.write(rest[:READ_BYTES]) :]


def empty_block(size: int) -> memoryview:
    """Memory of `size` bytes that is not set to anything: quicker than a `bytearray`."""
    return np.empty(size, np.uint8).data


def blocks(size: int) -> int:
    """Bytes of a file of `size` bytes in whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.name != LOCK_NAME:
                    found.append((Path(entry.path), entry.stat()))
    return found


def _is_abandoned(path: Path) -> bool:
    """Whether nobody holds the lock of an entry that is being written."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return False
    return True


def _read_ledger(descriptor: int) -> int | None:
    try:
        return int(os.pread(descriptor, 64, 0))
    except ValueError:
        return None


def _write_ledger(descriptor: int, taken: int) -> None:
    os.pwrite(descriptor, f"{taken:<32d}".encode(), 0)
