"""The queue of a capture's missing shards, and where finished ones are published; imports no torch.

Several engines of one host take from one queue, and several hosts take from one store: who gets a shard is
decided by a claim, and a finished shard appears in the capture's folder by a link, followed by its entry in
the staging folder, which whoever holds the capture's lock adds to the manifest. Neither ever replaces what is
there: a host that stood still while another took its shard over changes nothing when it wakes up.

    <store>/staging/<capture id>/
      claims/       who makes which shard now
      entries/      manifest entries of published shards
      quarantine/   samples that kill engines
      sessions/     what single engine sessions write
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from eagle3_core.artifacts import ArtifactRef, FileEntry
from eagle3_core.capture.job import LATER, CaptureJob, Later
from eagle3_core.host.process_tree import ProcessId, boot_id
from eagle3_core.store.claims import Claims
from eagle3_core.store.disk import is_no_space
from eagle3_core.store.files import sync_folder, write_atomic, write_new
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import PlannedShard

OWNER_NAME = "owner"


class Staging:
    """The folder through which all that work on one capture meet."""

    def __init__(self, store: LocalStore, capture: ArtifactRef) -> None:
        self.path = store.root / "staging" / capture.id
        self.capture_folder = store.folder(capture)

    @property
    def claims(self) -> Path:
        """Folder of the claims."""
        return self.path / "claims"

    @property
    def sessions(self) -> Path:
        """What single engine sessions write."""
        return self.path / "sessions"

    def open_session(self, name: str) -> Path:
        """Make the folder of an engine session of this process; nobody has used its name before."""
        folder = self.sessions / name
        folder.mkdir(parents=True)
        (folder / OWNER_NAME).write_text(f"{ProcessId.current()}\n{boot_id()}")
        return folder

    def remove_dead_sessions(self) -> list[str]:
        """Remove the folders of sessions whose step is gone, and return their names.

        What they had not published is lost with them. A session of another host is left alone: its own
        host removes it, at the latest with the finished capture.
        """
        dead = self.dead_sessions()
        for folder in dead:
            shutil.rmtree(folder, ignore_errors=True)
        return [folder.name for folder in dead]

    def dead_sessions(self) -> list[Path]:
        """The folders of sessions whose step is known to be gone."""
        dead = []
        for folder in sorted(self.sessions.glob("*")):
            with contextlib.suppress(OSError):
                process, _, boot = (folder / OWNER_NAME).read_text().partition("\n")
                owner = ProcessId.parse(process)
                if owner is not None and boot == boot_id() and owner.is_gone():
                    dead.append(folder)
        return dead

    def entry(self, shard: PlannedShard) -> FileEntry | None:
        """The manifest entry of a published shard, or None."""
        try:
            return FileEntry.model_validate_json(self._entry_path(shard).read_bytes())
        except (OSError, ValidationError):
            return None

    def publish(
        self, shard: PlannedShard, entry: FileEntry, session: Path, is_ours: Callable[[], bool] = lambda: True
    ) -> bool:
        """Give a session's finished shard its place in the capture, then say so.

        Args:
            shard: which.
            entry: of the manifest.
            session: folder that holds the file.
            is_ours: whether the shard's claim is still held.

        Returns:
            False where another has published the shard, or is about to.
        """
        source, place = session / shard.file_name, self.capture_folder / shard.file_name
        grave = session / f"{shard.file_name}.replaced"
        self.capture_folder.mkdir(parents=True, exist_ok=True)
        while not _link(source, place):
            if self.entry(shard) is not None or not is_ours():
                return False
            with contextlib.suppress(FileNotFoundError):
                place.rename(grave)  # left by one that died, or stood still, before it had written its entry
        sync_folder(self.capture_folder)
        if not write_new(self._entry_path(shard), entry.model_dump_json()):
            if grave.exists():  # its maker has woken up and written its entry: its file belongs to that
                grave.replace(place)
            return False
        source.unlink()
        return True

    def withdraw(self, shard: PlannedShard) -> None:
        """Forget a published shard that turned out damaged."""
        self._entry_path(shard).unlink(missing_ok=True)

    def quarantined(self) -> dict[str, str]:
        """Key and reason of every quarantined sample."""
        found = {}
        for path in sorted((self.path / "quarantine").glob("*.json")):
            with contextlib.suppress(FileNotFoundError):  # lifted, or all of it is finished
                record = json.loads(path.read_text())
                found[record["key"]] = record["reason"]
        return found

    def quarantine(self, key: str, reason: str) -> None:
        """Leave a sample out from now on."""
        write_atomic(self._quarantine_path(key), json.dumps({"key": key, "reason": reason}))

    def lift_quarantine(self, key: str) -> None:
        """Ask for a sample again from now on."""
        self._quarantine_path(key).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder of a finished capture."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _quarantine_path(self, key: str) -> Path:
        return self.path / "quarantine" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"

    def _entry_path(self, shard: PlannedShard) -> Path:
        return self.path / "entries" / f"{Path(shard.file_name).stem}.json"


def _link(source: Path, place: Path) -> bool:
    try:
        os.link(source, place)
        return True
    except FileExistsError:
        return False


@dataclass
class ShardState:
    """What this host knows of one shard."""

    shard: PlannedShard
    is_done: bool = False
    is_ours: bool = False
    attempts: int = 0
    after_death: int = 0
    suspects: list[str] = field(default_factory=list)


class ShardQueue:
    """Gives shards to this host's sessions; safe to call from several threads.

    Args:
        shards: all shards of the capture.
        staging: shared with other hosts.
        claims: of this process.

    A shard that was given back because its engine died is given only to sessions that began after that: they
    know which of its samples to send alone, and which to leave out.
    """

    def __init__(self, shards: Sequence[PlannedShard], staging: Staging, claims: Claims) -> None:
        self._states = {shard.index: ShardState(shard) for shard in shards}
        self._staging, self._claims = staging, claims
        self._lock = threading.RLock()
        self.deaths = 0
        self.times_suspected: Counter[str] = Counter()

    def done(self, index: int) -> None:
        """A shard is there, whoever made it."""
        with self._lock:
            self._states[index].is_done = True

    def reopen(self, index: int) -> bool:
        """A shard that seemed to be there is not; returns whether it seemed so."""
        with self._lock:
            state = self._states[index]
            was_done, state.is_done = state.is_done, False
            return was_done

    def missing(self) -> list[PlannedShard]:
        """Shards that are not there yet."""
        with self._lock:
            return [state.shard for state in self._states.values() if not state.is_done]

    def attempts(self, index: int) -> int:
        """How often this host has begun a shard."""
        return self._states[index].attempts

    def has_work(self) -> bool:
        """Whether a new session would get a shard."""
        with self._lock:
            return any(self._is_waiting(state, self.deaths) for state in self._states.values())

    def take(
        self, deaths_known: int, may_begin: Callable[[PlannedShard, list[PlannedShard]], bool] | None = None
    ) -> PlannedShard | Later | None:
        """Claim the next shard for a session, or None.

        Args:
            deaths_known: deaths that had happened when the session began.
            may_begin: told the shard and those that are in work here; where it says no, the answer is
                `LATER` and nothing is claimed.
        """
        with self._lock:
            in_work = [state.shard for state in self._states.values() if state.is_ours and not state.is_done]
            for state in self._states.values():
                if not self._is_waiting(state, deaths_known):
                    continue
                if may_begin and not may_begin(state.shard, in_work):
                    return LATER
                try:
                    is_claimed = self._claims.take(state.shard.file_name)
                except OSError as error:
                    if not is_no_space(error):
                        raise
                    return LATER
                if is_claimed:
                    if self._staging.entry(state.shard) is not None:
                        self._claims.release(state.shard.file_name)
                        state.is_done = True
                        continue
                    state.is_ours, state.attempts = True, state.attempts + 1
                    return state.shard
        return None

    def suspects(self) -> tuple[str, ...]:
        """Samples that were in flight when an engine died and whose shards are not there yet."""
        with self._lock:
            return tuple(
                key for state in self._states.values() if not state.is_done for key in state.suspects
            )

    def publish(self, index: int, job: CaptureJob, facts: dict[str, object]) -> bool:
        """Publish a shard that a session has written; False where its claim had been taken over.

        Args:
            index: of the shard.
            job: the session's.
            facts: added to the manifest entry.
        """
        with self._lock:
            state = self._states[index]
            entry = job.finished_entry(state.shard)
            assert entry is not None, f"{state.shard.file_name} was announced without an entry"
            name = state.shard.file_name
            is_valid = self._claims.is_mine(name)
            if is_valid:
                entry = entry.model_copy(update={"facts": entry.facts | facts})
                is_valid = self._staging.publish(
                    state.shard, entry, Path(job.folder), lambda: self._claims.is_mine(name)
                )
                self._claims.release(name)
                state.is_done = is_valid
            state.is_ours = False
            return is_valid

    def give_back(self, indices: Sequence[int], in_flight: Sequence[str], keys: dict[str, int]) -> None:
        """Give back what a dead session had begun.

        Args:
            indices: its unfinished shards.
            in_flight: keys of the samples that it was computing.
            keys: the shard of each key.
        """
        with self._lock:
            self.deaths += 1
            self.times_suspected.update(in_flight)
            for index in indices:
                state = self._states[index]
                state.is_ours, state.after_death = False, self.deaths
                found = [key for key in in_flight if keys[key] == index]
                state.suspects = list(dict.fromkeys([*state.suspects, *found]))
                self._claims.release(state.shard.file_name)

    def acquit(self, key: str, index: int) -> None:
        """A sample is no suspect any more: it is quarantined."""
        with self._lock:
            state = self._states[index]
            state.suspects = [suspect for suspect in state.suspects if suspect != key]

    def _is_waiting(self, state: ShardState, deaths_known: int) -> bool:
        return (
            not state.is_done
            and not state.is_ours
            and state.after_death <= deaths_known
            and not self._claims.is_held_elsewhere(state.shard.file_name)
        )
