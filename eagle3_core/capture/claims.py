"""Who makes which shard: claims in a folder that all hosts of a capture see; imports no torch.

A claim is a file linked to its name, which one of two hosts can do. Its owner touches it every few
seconds. A claim is free again when its owner is known to be dead (a process of this host that is gone) or has
not touched it for long; clocks of hosts are not compared, only times that the file system itself has given.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from pathlib import Path

from eagle3_core.host.process_tree import ProcessId, boot_id

STALE_SECONDS = 120.0
HEARTBEAT_SECONDS = 5.0
CLAIM_SUFFIX = ".claim"


class ShardClaims:
    """The claims of one process on the shards of a capture.

    Args:
        folder: shared by all that work on the capture.
        stale_seconds: after this time without a touch a claim of another host is taken over.
    """

    def __init__(self, folder: Path, stale_seconds: float = STALE_SECONDS) -> None:
        self._folder, self._stale = folder, stale_seconds
        self._owner = {
            "process": str(ProcessId.current()), "boot": boot_id(), "token": uuid.uuid4().hex
        }  # fmt: skip
        self._mine: set[str] = set()
        self._lock = threading.Lock()
        self._clock = folder / f".clock-{self._owner['token']}"
        folder.mkdir(parents=True, exist_ok=True)
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="shard-claims", daemon=True)
        self._heart.start()

    def take(self, name: str) -> bool:
        """Claim a shard; False where a living owner has it."""
        path = self._path(name)
        if not self._make(path) and not self.is_mine(name) and not self._take_over(path):
            return False
        with self._lock:
            self._mine.add(name)
        return True

    def is_mine(self, name: str) -> bool:
        """Whether this process still holds the claim: nobody has taken it over."""
        return (_read(self._path(name)) or {}).get("token") == self._owner["token"]

    def release(self, name: str) -> None:
        """Give a claim back, or end it because the shard is there."""
        with self._lock:
            self._mine.discard(name)
        if self.is_mine(name):
            self._path(name).unlink(missing_ok=True)

    def is_held_elsewhere(self, name: str) -> bool:
        """Whether a living owner other than this process works on the shard."""
        path = self._path(name)
        return path.exists() and not self.is_mine(name) and not self._is_free(path, _read(path))

    def close(self) -> None:
        """Give all claims back."""
        self._ended.set()
        self._heart.join()
        for name in list(self._mine):
            self.release(name)
        self._clock.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{CLAIM_SUFFIX}"

    def _make(self, path: Path) -> bool:
        """Write the claim whole under another name and link it: it is never seen half written."""
        draft = path.with_name(f".{path.name}-{self._owner['token']}")
        draft.write_text(json.dumps(self._owner))
        try:
            os.link(draft, path)
            return True
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)

    def _is_free(self, path: Path, owner: dict[str, str] | None) -> bool:
        """Whether the owner that a claim names is gone; one that a crash left unreadable is judged by age."""
        process = ProcessId.parse(owner["process"]) if owner and owner.get("boot") == boot_id() else None
        if process is not None and process.namespace == ProcessId.current().namespace:
            return process.is_gone()
        self._clock.touch()
        try:
            return self._clock.stat().st_mtime - path.stat().st_mtime > self._stale
        except FileNotFoundError:
            return True

    def _take_over(self, path: Path) -> bool:
        owner = _read(path)
        return self._is_free(path, owner) and self._remove_stale(path, owner) and self._make(path)

    def _remove_stale(self, path: Path, owner: dict[str, str] | None) -> bool:
        """Move a dead owner's claim away; only one of several that try it succeeds."""
        grave = path.with_name(f".{path.name}-dead-{self._owner['token']}")
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


def _read(path: Path) -> dict[str, str] | None:
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and {"process", "token"} <= owner.keys() else None
