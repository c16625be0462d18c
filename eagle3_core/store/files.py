"""Files that appear whole or not at all, and their hashes.

Order of every write: temporary name, write, fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import xxhash

from eagle3_core.artifacts import FileEntry
from eagle3_core.errors import StoreError
from eagle3_core.store.disk import patiently
from eagle3_core.store.tree import files_below

READ_BYTES = 1 << 20
"""Small enough to stay in a core's cache between reading and hashing."""
TEMPORARY_PREFIX = ".tmp-"
LOCK_NAME = ".lock"
"""Of the file that says who holds a folder; others that begin so exist while somebody waits for it."""


@contextlib.contextmanager
def atomic_file(path: Path, before_rename: Callable[[], None] | None = None) -> Iterator[IO[bytes]]:
    """Open a temporary file that becomes `path` when the block ends without an error.

    Args:
        path: the final name.
        before_rename: asked when all is on the disk; may raise, and then nothing has changed.

    Raises:
        StoreError: another process has removed the temporary file: it has taken the folder over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        if before_rename is not None:
            before_rename()
        _replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _replace(temporary: Path, path: Path) -> None:
    try:
        temporary.replace(path)
    except FileNotFoundError:
        raise StoreError(
            f"{temporary} is gone: another process has taken {path.parent} over while this one stood still",
            remedy="let that run finish",
        ) from None


class HashingWriter:
    """Hashes what passes through it, so that a large file is not read again for its manifest entry.

    Each hash has a thread of its own beside the one that writes, and nothing is copied: memory that was
    handed to `write` must stay as it is until `wait` has returned.

    Args:
        handle: the file.
        with_sha256: make a SHA-256 too.
    """

    def __init__(self, handle: IO[bytes], with_sha256: bool = False) -> None:
        self._handle = handle
        self._digest = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if with_sha256 else None
        self._threads = [ThreadPoolExecutor(1, "hash") for _ in range(2 if with_sha256 else 1)]
        self._begun: list[Future[object]] = []
        self.bytes = 0

    def write(self, block: bytes | memoryview) -> None:
        """Write one block of bytes while it is hashed."""
        self.beside(self._digest.update, block)
        if self._sha256 is not None:
            self._begun.append(self._threads[1].submit(self._sha256.update, block))
        self._handle.write(block)
        self.bytes += len(block)

    def beside(self, work: Callable[..., object], *arguments: object) -> None:
        """Let the first hashing thread do this after what it has to do."""
        self._begun.append(self._threads[0].submit(work, *arguments))

    def wait(self) -> None:
        """Wait until all that was handed over so far is hashed."""
        for future in self._begun:
            future.result()
        self._begun.clear()

    def hexdigest(self) -> str:
        """xxh3_128 of all that was written, as hex."""
        self.wait()
        return self._digest.hexdigest()

    def sha256(self) -> str | None:
        """SHA-256 of all that was written, as hex; None if it was not asked for."""
        self.wait()
        return self._sha256.hexdigest() if self._sha256 is not None else None

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)


def write_atomic(path: Path, content: bytes | str, before_rename: Callable[[], None] | None = None) -> None:
    """Replace `path` by `content` in one step that survives a crash, and waits where the disk is full; see
    `atomic_file`.
    """
    whole = content.encode() if isinstance(content, str) else content

    def write() -> None:
        with atomic_file(path, before_rename) as handle:
            handle.write(whole)

    patiently(write, path.parent, len(whole), path.name)


def append(handle: io.FileIO, content: bytes, path: Path) -> None:
    """Add to a file that was opened unbuffered; on a full disk it waits and goes on where it stopped."""
    rest = memoryview(content)

    def write() -> None:
        nonlocal rest
        while rest:
            rest = rest[handle.write(rest) or 0 :]

    patiently(write, path.parent, len(content), path.name)


def write_new(path: Path, content: bytes | str) -> bool:
    """Give `path` this content unless it is there already; of several that try it, one succeeds."""
    draft = path.with_name(f"{TEMPORARY_PREFIX}{path.name}.{uuid.uuid4().hex}")
    write_atomic(draft, content)
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_lock_file(path: Path) -> bool:
    """Whether a file belongs to its folder's lock."""
    return path.name == LOCK_NAME or path.name.startswith(f"{LOCK_NAME}-")


def temporary_files(folder: Path) -> list[Path]:
    """What is being written below a folder, or was when its writer was interrupted."""
    return [path for path in files_below(folder) if path.name.startswith(TEMPORARY_PREFIX)]


def remove_temporary_files(folder: Path) -> None:
    """Remove what an interrupted writer left; call it with the folder's lock held."""
    for leftover in temporary_files(folder):
        leftover.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """xxh3_128 of a file's bytes, as hex."""
    digest = xxhash.xxh3_128()
    block = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as handle:
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := handle.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def file_entry(folder: Path, path: Path, **facts: object) -> FileEntry:
    """The manifest entry of a finished file."""
    return FileEntry(
        path=path.relative_to(folder).as_posix(),
        bytes=path.stat().st_size,
        xxh3_128=hash_file(path),
        facts=dict(facts),
    )


def file_problem(folder: Path, entry: FileEntry) -> str | None:
    """Why a file is not what its manifest entry says, or None."""
    path = folder / entry.path
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"{path} has {size:,} bytes, its manifest says {entry.bytes:,}"
    if hash_file(path) != entry.xxh3_128:
        return f"{path} does not match its hash"
    return None
