"""Claims: who works on what, in a folder that several processes and hosts see; imports no torch.

A claim is a file linked to its name, which one of two processes can do, on NFS too. Its owner touches it
every few seconds. A claim is free again when its owner is known to be dead (a process of this host that is
gone) or has not touched it for long; clocks of hosts are not compared, only times that the file system itself
has given.

An owner that stood still for so long may wake up: what it does must be harmless until it has asked `is_mine`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import uuid
from pathlib import Path

from eagle3_core.errors import StoreError
from eagle3_core.host.process_tree import ProcessId, boot_id

STALE_SECONDS = 120.0
HEARTBEAT_SECONDS = 5.0
CLAIM_SUFFIX = ".claim"
MOVED_ATTEMPTS = 10

logger = logging.getLogger(__name__)


class Claims:
    """The claims of one process on names in a folder.

    Args:
        folder: shared by all that work on the same thing.
        stale_seconds: after this time without a touch a claim of another host is taken over.
        run_id: of the run that claims, for messages.
        suffix: of the files that are claims.
        hidden: prefix of the files that exist for moments only.

    Raises:
        StoreError: the folder cannot be written; a full disk is an OSError, which may pass.
    """

    def __init__(
        self,
        folder: Path,
        stale_seconds: float = STALE_SECONDS,
        run_id: str | None = None,
        suffix: str = CLAIM_SUFFIX,
        hidden: str = ".",
    ) -> None:
        self._folder, self._stale, self._suffix, self._hidden = folder, stale_seconds, suffix, hidden
        self._token = uuid.uuid4().hex
        self._owner = {
            "process": str(ProcessId.current()), "boot": boot_id(), "token": self._token,
            "host": socket.gethostname(), "run": run_id or "",
        }  # fmt: skip
        self._mine: set[str] = set()
        self._lock = threading.Lock()
        self._clock = folder / f"{hidden}clock-{self._token}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _failure(folder, error) from error
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="claims", daemon=True)
        self._heart.start()

    def take(self, name: str) -> bool:
        """Claim a name; False where a living owner has it.

        Raises:
            StoreError: as the class.
        """
        for attempt in range(MOVED_ATTEMPTS):
            try:
                if not self._try(name):
                    return False
                break
            except FileNotFoundError as error:  # the folder was moved away at this moment
                if attempt == MOVED_ATTEMPTS - 1:
                    raise _failure(self._folder, error) from error
            except OSError as error:
                raise _failure(self._folder, error) from error
        with self._lock:
            self._mine.add(name)
        return True

    def _try(self, name: str) -> bool:
        path = self._path(name)
        return self._make(path) or self.is_mine(name) or self._take_over(path)

    def is_mine(self, name: str) -> bool:
        """Whether this process still holds the claim: nobody has taken it over."""
        return (_read(self._path(name)) or {}).get("token") == self._token

    def release(self, name: str) -> None:
        """Give a claim back, or end it because the work is done."""
        with self._lock:
            self._mine.discard(name)
        if self.is_mine(name):
            self._path(name).unlink(missing_ok=True)

    def is_held_elsewhere(self, name: str) -> bool:
        """Whether a living owner other than this process has the name."""
        path = self._path(name)
        return path.exists() and not self.is_mine(name) and not self._is_free(path, _read(path))

    def owner(self, name: str) -> str:
        """Who holds a name, in words."""
        return describe(_read(self._path(name)))

    def close(self) -> None:
        """Give all claims back."""
        self._ended.set()
        self._heart.join()
        for name in list(self._mine):
            self.release(name)
        with contextlib.suppress(OSError):
            self._clock.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{self._suffix}"

    def _beside(self, path: Path, what: str) -> Path:
        return self._folder / f"{self._hidden}{what}-{path.name.lstrip('.')}-{self._token}"

    def _make(self, path: Path) -> bool:
        """Write the claim whole under another name and link it: it is never seen half written."""
        draft = self._beside(path, "draft")
        self._folder.mkdir(parents=True, exist_ok=True)  # it may have been moved away while this one waited
        draft.write_text(json.dumps(self._owner))
        try:
            os.link(draft, path)
            return True
        except FileExistsError:
            # A server may have linked it and its answer was lost: then the second try finds it there.
            return draft.stat().st_nlink == 2
        finally:
            with contextlib.suppress(OSError):  # the error of the write is the one to tell
                draft.unlink(missing_ok=True)

    def _is_free(self, path: Path, owner: dict[str, str] | None) -> bool:
        """Whether the owner that a claim names is gone; one that a crash left unreadable is judged by age."""
        process = ProcessId.parse(owner["process"]) if owner and owner.get("boot") == boot_id() else None
        if process is not None and process.namespace == ProcessId.current().namespace:
            return process.is_gone()
        try:
            self._clock.touch()
            return self._clock.stat().st_mtime - path.stat().st_mtime > self._stale
        except FileNotFoundError:
            return not path.exists()

    def _take_over(self, path: Path) -> bool:
        owner = _read(path)
        if owner is None and not path.exists():  # given back: whoever links first has it
            return self._make(path)
        if not self._is_free(path, owner) or not self._remove_stale(path, owner) or not self._make(path):
            return False
        logger.warning("took %s over from %s, which is dead or stands still", path, describe(owner))
        return True

    def _remove_stale(self, path: Path, owner: dict[str, str] | None) -> bool:
        """Move a dead owner's claim away; only one of several that try it succeeds."""
        if _read(path) != owner:
            return False
        grave = self._beside(path, "dead")
        try:
            path.rename(grave)
        except FileNotFoundError:
            return True
        if _read(grave) != owner:  # another process took it over in between: give its claim back
            with contextlib.suppress(FileExistsError):
                os.link(grave, path)
            grave.unlink(missing_ok=True)
            return False
        grave.unlink(missing_ok=True)
        return True

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with self._lock:
                mine = list(self._mine)
            for name in mine:
                with contextlib.suppress(OSError):
                    if self.is_mine(name):
                        os.utime(self._path(name))


def describe(owner: dict[str, str] | None) -> str:
    """The owner of a claim in words."""
    process = ProcessId.parse(owner["process"]) if owner else None
    if owner is None or process is None:
        return "unknown"
    run = f", run {owner['run']}" if owner.get("run") else ""
    return f"pid {process.pid} on {owner.get('host') or 'an unknown host'}{run}"


def _failure(folder: Path, error: OSError) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return error
    return StoreError(
        f"cannot write into {folder} ({error.strerror or error})",
        expected="a folder that can be written, on a file system with hard links",
        remedy="check the mount and its permissions",
    )


def _read(path: Path) -> dict[str, str] | None:
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and {"process", "token"} <= owner.keys() else None
