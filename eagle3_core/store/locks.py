"""One holder a folder, also where several hosts share it and where the last holder died."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from eagle3_core.errors import FolderInUseError
from eagle3_core.store.claims import STALE_SECONDS, Claims
from eagle3_core.store.disk import patiently
from eagle3_core.store.files import LOCK_NAME

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.2
LOCK_BYTES = 4096
OLD_SECONDS = 3600.0
"""A file beside a lock that is older belongs to nobody."""


class FolderLock:
    """A folder that this process holds; made by `folder_lock`."""

    def __init__(self, folder: Path, claims: Claims) -> None:
        self.folder, self._claims = folder, claims

    def check(self) -> None:
        """Ask whether the folder is still held; called before anything that another holder must not see.

        Raises:
            FolderInUseError: this process stood still for so long that another has taken the folder over.
        """
        if not self._claims.is_mine(LOCK_NAME):
            raise FolderInUseError(
                f"{self.folder} was taken over by another process ({self._claims.owner(LOCK_NAME)}) while "
                "this one stood still",
                remedy="let that run finish: nothing was written over it",
            )


@contextlib.contextmanager
def folder_lock(
    folder: Path, wait_seconds: float = 60.0, run_id: str | None = None, stale_seconds: float = STALE_SECONDS
) -> Iterator[FolderLock]:
    """Hold `folder` exclusively. A dead holder of this host is followed at once, one of another host when it
    has shown no life for `stale_seconds`.

    Args:
        folder: made where it is missing.
        wait_seconds: how long to wait for a living holder.
        run_id: of the run, for the messages of others.
        stale_seconds: see above.

    Raises:
        FolderInUseError: somebody else still holds it after `wait_seconds`; names the holder.
        StoreError: the folder cannot be written.
    """
    make = functools.partial(Claims, folder, stale_seconds, run_id, suffix="", hidden=f"{LOCK_NAME}-")
    claims = patiently(make, folder, LOCK_BYTES, "a lock")
    take = functools.partial(claims.take, LOCK_NAME)
    try:
        deadline, is_told = time.monotonic() + wait_seconds, False
        while not patiently(take, folder, LOCK_BYTES, "a lock"):
            if wait_seconds and not is_told:
                logger.info("waiting for %s, which is in use by %s", folder, claims.owner(LOCK_NAME))
                is_told = True
            if time.monotonic() >= deadline:
                raise FolderInUseError(
                    f"{folder} is in use by another process ({claims.owner(LOCK_NAME)})",
                    remedy="wait for that run or end it; a dead process of another host is followed after "
                    f"{stale_seconds:g} s",
                )
            time.sleep(POLL_SECONDS)
        _remove_old_files(folder)
        yield FolderLock(folder, claims)
    finally:
        claims.close()


def _remove_old_files(folder: Path) -> None:
    """Remove what processes that were killed while they waited have left beside the lock."""
    with contextlib.suppress(FileNotFoundError):
        now = (folder / LOCK_NAME).stat().st_mtime
        for path in folder.glob(f"{LOCK_NAME}-*"):
            if now - path.stat().st_mtime > OLD_SECONDS:
                path.unlink(missing_ok=True)
