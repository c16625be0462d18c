"""Keeps a reserve of free space: asks before large writes, and waits or fails where a disk is full.

A process that writes installs its `DiskGuard` with `guarding`. Then `make_room` waits until bytes fit above
the reserve, `patiently` repeats a write that found the disk full, and `write_atomic` does so for every small
file. Without a guard they let everything through, errors too.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from eagle3_core.errors import DiskFullError, Eagle3Error, HostError
from eagle3_core.host.inspect import GIB, free_disk_bytes
from eagle3_core.host.volume import volume_of
from eagle3_core.sections import LimitsConfig
from eagle3_core.store.reserve import Reservations

POLL_SECONDS = 1.0
REPEAT_SECONDS = 600.0
NO_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT}
MAKE_ROOM = "make room and start the run again: what is finished is kept"
REFUSED_ERRORS = {errno.EROFS, errno.EACCES, errno.EPERM}

logger = logging.getLogger(__name__)
T = TypeVar("T")


def is_no_space(error: BaseException) -> bool:
    """Whether a write failed because a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in NO_SPACE_ERRORS


def as_host_error(error: OSError) -> Eagle3Error | None:
    """A full disk or a folder that cannot be written, in one line for the user; None for other errors."""
    where, why = error.filename or "the disk", error.strerror or error
    if error.errno in NO_SPACE_ERRORS:
        return DiskFullError(
            f"no space: {where} cannot be written ({why})",
            remedy=MAKE_ROOM,
        )
    if error.errno in REFUSED_ERRORS:
        return HostError(
            f"{where} cannot be written ({why})",
            remedy="make it writable, or name another folder; then start the run again",
        )
    return None


@dataclass(frozen=True)
class Shortage:
    """Bytes that do not fit."""

    path: Path
    free: int
    needed: int
    reserved: int = 0
    holders: tuple[str, ...] = ()
    is_known: bool = True

    def __str__(self) -> str:
        if not self.is_known:
            return f"no space: a write to {self.path} found the disk full"
        text = f"no space: {self.free:,} bytes free on {self.path}, {self.needed:,} needed above the reserve"
        if self.reserved:
            text += f" and {self.reserved:,} reserved by {', '.join(self.holders)}"
        return text


class DiskGuard:
    """Decides whether bytes fit above the reserve, and what happens where they do not.

    Args:
        limits: reserve and policy.
        run_id: whose reservation is its own; space that a run reserved earlier than it is not free.
        report: told why work is paused, and None when it goes on.
        on_poll: called while it waits; may raise to end the wait.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        run_id: str | None = None,
        report: Callable[[str | None], None] | None = None,
        on_poll: Callable[[], None] | None = None,
    ) -> None:
        self._limits, self._run_id = limits, run_id
        self._report, self._on_poll = report, on_poll
        self._reservations = Reservations(limits.reservations)
        self._lock = threading.RLock()
        self._since: float | None = None
        self._last_log = 0.0

    @property
    def reserve(self) -> int:
        """Bytes that must stay free."""
        return round(self._limits.min_free_disk_gib * GIB)

    @property
    def is_paused(self) -> bool:
        """Whether work waits for space."""
        return self._since is not None

    def shortage(self, path: Path, num_bytes: int) -> Shortage | None:
        """Why `num_bytes` more do not fit at `path`, or None."""
        needed, free = num_bytes + self.reserve, free_disk_bytes(path)
        others = self._reservations.before(self._run_id, volume_of(path)) if self._run_id else {}
        reserved = sum(others.values())
        if free - reserved >= needed:
            return None
        return Shortage(path, free, num_bytes, reserved, tuple(others))

    def has_room(self, path: Path, num_bytes: int, what: str) -> bool:
        """Whether work may go on; tells once when it is paused, and when it goes on.

        Raises:
            DiskFullError: there is no room, and the policy is to fail, or it has been so for too long.
        """
        shortage = self.shortage(path, num_bytes)
        if shortage is None:
            self._resume()
            return True
        self._pause(shortage, what)
        return False

    def make_room(self, path: Path, num_bytes: int, what: str) -> None:
        """Wait until the bytes fit.

        Raises:
            DiskFullError: as `has_room`.
        """
        while not self.has_room(path, num_bytes, what):
            self._poll()

    def patiently(self, write: Callable[[], T], path: Path, num_bytes: int, what: str) -> T:
        """Call `write` until no full disk stops it; it must leave nothing behind when it fails.

        Raises:
            DiskFullError: as `has_room`.
        """
        has_waited = False
        while True:
            try:
                done = write()
            except OSError as error:
                if not is_no_space(error):
                    raise
                has_waited = True
                self.found_full(path, num_bytes, what)
                self._poll()
                if self.shortage(path, num_bytes):
                    self.make_room(path, num_bytes, what)
                continue
            if has_waited:  # a small file that fits says nothing of what waits elsewhere
                self._resume()
            return done

    def found_full(self, path: Path, num_bytes: int, what: str) -> None:
        """A write of these bytes has found the disk, or a quota, full.

        Raises:
            DiskFullError: as `has_room`.
        """
        shortage = self.shortage(path, num_bytes)
        self._pause(shortage or Shortage(path, 0, num_bytes, is_known=False), what)

    def _pause(self, shortage: Shortage, what: str) -> None:
        if self._limits.on_full_disk == "fail":
            raise _full(shortage, what)
        with self._lock:
            now = time.monotonic()
            if self._since is None:
                self._since, self._last_log = now, now
                logger.warning("paused before %s: %s", what, shortage)
            elif now - self._last_log > REPEAT_SECONDS:
                self._last_log = now
                logger.warning("still paused before %s: %s", what, shortage)
            if now - self._since > self._limits.pause_timeout_minutes * 60:
                raise _full(shortage, what, self._limits.pause_timeout_minutes)
        if self._report:
            self._report(f"paused: {shortage}")

    def _resume(self) -> None:
        with self._lock:
            if self._since is None:
                return
            logger.info("there is space again after %.0f s: going on", time.monotonic() - self._since)
            self._since = None
        if self._report:
            self._report(None)

    def _poll(self) -> None:
        time.sleep(POLL_SECONDS)
        if self._on_poll:
            self._on_poll()


_guards: list[DiskGuard | None] = []


@contextlib.contextmanager
def guarding(guard: DiskGuard) -> Iterator[DiskGuard]:
    """Let `guard` watch what this process writes, in all its threads."""
    _guards.append(guard)
    try:
        yield guard
    finally:
        _guards.remove(guard)


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Write without a guard: at once or not at all."""
    _guards.append(None)
    try:
        yield
    finally:
        _guards.remove(None)


def make_room(path: Path, num_bytes: int, what: str) -> None:
    """Wait until bytes that are to be written at `path` fit above the reserve; see `DiskGuard.make_room`."""
    guard = _guards[-1] if _guards else None
    if guard:
        guard.make_room(path, num_bytes, what)


def fits(path: Path, num_bytes: int) -> bool:
    """Whether bytes fit above the reserve, for what can do without them; true where no guard is installed."""
    guard = _guards[-1] if _guards else None
    return guard is None or guard.shortage(path, num_bytes) is None


def patiently(write: Callable[[], T], path: Path, num_bytes: int, what: str) -> T:
    """Repeat a write that finds the disk full; see `DiskGuard.patiently`."""
    guard = _guards[-1] if _guards else None
    return guard.patiently(write, path, num_bytes, what) if guard else write()


def _full(shortage: Shortage, what: str, minutes: float | None = None) -> DiskFullError:
    waited = f", for {minutes:g} minutes (limits.pause_timeout_minutes)" if minutes else ""
    return DiskFullError(
        f"{shortage} for {what}{waited}",
        remedy=MAKE_ROOM,
    )
