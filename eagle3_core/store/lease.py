"""One writer an artifact among all hosts that share a bucket: a lease object that its holder renews.

It is put on the condition that nobody else's is there, where the server knows conditions, and read back where
it may not. It is free again when its holder is a dead process of this host, or when it has not been renewed
for long; ages are the server's, so that clocks of hosts do not matter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from eagle3_core.errors import FolderInUseError, ObjectStoreError
from eagle3_core.host.process_tree import ProcessId, boot_id
from eagle3_core.store.object_wire import ObjectFacts
from eagle3_core.store.objects import ObjectClient

LEASE_NAME = ".lease"
STALE_SECONDS = 300.0
HEARTBEAT_SECONDS = 20.0
POLL_SECONDS = 1.0

logger = logging.getLogger(__name__)


class LeaseHeldError(FolderInUseError):
    """Another host, or another workspace of this one, writes an artifact of the bucket."""


class Lease:
    """A lease that this process holds; made by `hold_lease`."""

    def __init__(self, client: ObjectClient, key: str, run_id: str | None, stale_seconds: float) -> None:
        self._client, self._key, self._stale = client, key, stale_seconds
        self._token = uuid.uuid4().hex
        self._owner = {
            "process": str(ProcessId.current()), "boot": boot_id(), "host": socket.gethostname(),
            "run": run_id or "", "token": self._token,
        }  # fmt: skip
        self._etag, self._beats = "", 0
        self._put_at = _now()
        self._taken_by: str | None = None
        self._putting, self._ended = threading.Lock(), threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lease", daemon=True)

    def take(self) -> str | None:
        """Try to get the lease; returns None, or who has it."""
        found = self._read()
        if found is not None:
            owner, facts = found
            if owner.get("token") != self._token and not self._is_free(owner, facts):
                return _describe(owner)
        etag = (
            self._client.put_bytes(self._key, self._content(), only_new=True)
            if found is None
            else self._client.put_bytes(self._key, self._content(), replaces=found[1].etag)
        )
        # Read it back also where it was put: a server without conditions lets two hosts put it.
        found = self._read()
        if found is None or found[0].get("token") != self._token:
            return _describe(found[0]) if found else "nobody: it was taken away at once"
        self._etag, self._put_at = etag or found[1].etag, _now()
        return None

    def start(self) -> None:
        """Begin to put it again every few seconds."""
        self._heart.start()

    def check(self) -> None:
        """Ask whether the lease is still held; called before anything that another holder must not see.

        Raises:
            LeaseHeldError: another host has taken it over.
            ObjectStoreError: it cannot be found out.
        """
        if self._taken_by is None and _now() - self._put_at > self._stale / 2:
            self._put_again()
        if self._taken_by is not None:
            raise LeaseHeldError(
                f"{self._client.url(self._key)} was taken over by another process ({self._taken_by}) while "
                "this one stood still or was cut off",
                remedy="let that run finish: nothing was written over it",
            )

    def release(self) -> None:
        """Give it back, if it is still ours."""
        self._ended.set()
        if self._heart.ident is not None:
            self._heart.join()
        with contextlib.suppress(ObjectStoreError):
            found = self._read()
            if found is not None and found[0].get("token") == self._token:
                self._client.delete([self._key])

    def _beat(self) -> None:
        while not self._ended.wait(min(HEARTBEAT_SECONDS, self._stale / 4)) and self._taken_by is None:
            try:
                self._put_again()
            except ObjectStoreError as error:
                logger.warning("the lease of an artifact could not be renewed: %s", error)

    def _put_again(self) -> None:
        with self._putting:
            # A server that ignores conditions would let us overwrite the lease of who has followed us.
            is_late = _now() - self._put_at > self._stale / 2
            etag = None if is_late else self._renew(self._etag)
            if etag is None:  # somebody else's, or ours whose answer was lost
                found = self._read()
                if found is None or found[0].get("token") != self._token:
                    self._taken_by = _describe(found[0]) if found else "it is gone"
                    return
                etag = self._renew(found[1].etag)
                if etag is None:
                    self._taken_by = "it was followed this moment"
                    return
            self._etag, self._put_at = etag, _now()

    def _renew(self, etag: str) -> str | None:
        return self._client.put_bytes(self._key, self._content(), replaces=etag)

    def _content(self) -> bytes:
        self._beats += 1
        return json.dumps(self._owner | {"beat": self._beats}).encode()

    def _read(self) -> tuple[dict[str, str], ObjectFacts] | None:
        found = self._client.get_bytes(self._key)
        if found is None:
            return None
        try:
            owner = json.loads(found[0])
        except ValueError:
            owner = {}
        return (owner if isinstance(owner, dict) else {}), found[1]

    def _is_free(self, owner: dict[str, str], facts: ObjectFacts) -> bool:
        """Whether its holder is gone."""
        process = ProcessId.parse(owner.get("process", "")) if owner.get("boot") == boot_id() else None
        if process is not None and process.namespace == ProcessId.current().namespace:
            return process.is_gone()
        return facts.age_seconds > self._stale


@contextlib.contextmanager
def hold_lease(
    client: ObjectClient,
    folder: str,
    wait_seconds: float,
    run_id: str | None = None,
    stale_seconds: float = STALE_SECONDS,
) -> Iterator[Lease]:
    """Hold an artifact of a bucket exclusively.

    Args:
        client: of the bucket.
        folder: the artifact's prefix.
        wait_seconds: how long to wait for a living holder.
        run_id: of the run, for the messages of others.
        stale_seconds: after this time without a sign of life a holder on another host is followed.

    Raises:
        LeaseHeldError: somebody else still holds it after `wait_seconds`; names the holder.
        ObjectAccessError: the bucket cannot be written.
    """
    lease = Lease(client, f"{folder}/{LEASE_NAME}", run_id, stale_seconds)
    deadline = time.monotonic() + wait_seconds
    while (holder := lease.take()) is not None:
        if time.monotonic() >= deadline:
            raise LeaseHeldError(
                f"{client.url(folder)} is in use by another process ({holder})",
                remedy=f"wait for that run or end it; a dead host is followed after {stale_seconds:g} s",
            )
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
    try:
        lease.start()
        yield lease
    finally:
        lease.release()


def _now() -> float:
    """Seconds that also pass while this host sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _describe(owner: dict[str, str]) -> str:
    process = ProcessId.parse(owner.get("process", ""))
    number = f"process {process.pid}" if process else "a process"
    run = f", run {owner['run']}" if owner.get("run") else ""
    return f"{number} on {owner.get('host', 'an unknown host')}{run}"
