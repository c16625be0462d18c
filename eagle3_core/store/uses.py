"""Who uses what in a store: a run says so in the store itself, where garbage collection of any host reads it.

`uses/<run id>.json` names the run's artifacts, made or still to be made. A run writes it before it looks
whether an artifact is there; garbage collection reads it again after it has moved one away, and moves it
back if somebody uses it. So whichever comes second sees the other. The note is removed when the run ends. One
that a killed run leaves counts no longer when its process is known to be gone, or has not touched it for an
hour where that cannot be known (another host). Stores without such notes are stores that nobody uses.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterable
from types import TracebackType

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.errors import StoreError
from eagle3_core.host.process_tree import ProcessId, boot_id
from eagle3_core.store.local import LocalStore

USES = "uses"
HEARTBEAT_SECONDS = 60.0
STALE_SECONDS = 3600.0
SUFFIX = ".json"

logger = logging.getLogger(__name__)


class Use(BaseModel):
    """What one run uses."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run_id: str
    process: str
    boot: str
    host: str
    artifacts: tuple[ArtifactRef, ...]

    def is_over(self, age_seconds: float) -> bool:
        """Whether the run is known to have ended; by the age of its note where its process cannot be seen."""
        process = ProcessId.parse(self.process) if self.boot == boot_id() else None
        if process is not None and process.namespace == ProcessId.current().namespace:
            return process.is_gone()
        return age_seconds > STALE_SECONDS


class RunUse:
    """Keeps the note of one run young while a block lasts; the note itself stays until `end_use`."""

    def __init__(self, run_id: str, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._run_id, self._every = run_id, heartbeat_seconds
        self._stores: list[LocalStore] = []
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None

    def say(self, store: LocalStore, artifacts: Iterable[ArtifactRef]) -> None:
        """Write the note: these artifacts are used until the run ends.

        Raises:
            StoreError: the store cannot be written.
        """
        use = Use(
            run_id=self._run_id,
            process=str(ProcessId.current()),
            boot=boot_id(),
            host=socket.gethostname(),
            artifacts=tuple(artifacts),
        )
        try:
            store.notes(USES).write(self._run_id + SUFFIX, use.model_dump_json())
        except OSError as error:
            raise StoreError(
                f"cannot note in {store.place} what the run uses ({error})", remedy="make it writable"
            ) from error
        self._stores = [store]
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, name="store-use", daemon=True)
            self._heart.start()

    def __enter__(self) -> RunUse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(self._every):
            for store in self._stores:
                try:
                    store.notes(USES).touch(self._run_id + SUFFIX)
                except (OSError, StoreError) as error:
                    logger.warning("cannot touch the note of what the run uses (%s)", error)


def end_use(store: LocalStore, run_id: str) -> None:
    """Remove the note of a run that has ended; where that fails, the note counts until it is stale."""
    try:
        store.notes(USES).remove(run_id + SUFFIX)
    except (OSError, StoreError) as error:
        logger.warning("cannot remove the note of what the run used (%s)", error)


def current_uses(store: LocalStore) -> list[Use]:
    """What runs in progress use; notes of runs that are over are removed on the way.

    Raises:
        StoreError: a note cannot be read, so what it keeps is not known.
    """
    notes, uses = store.notes(USES), []
    for name, age in notes.ages().items():
        text = notes.read(name)
        if text is None:
            continue
        try:
            use = Use.model_validate_json(text)
        except ValidationError as error:
            raise StoreError(
                f"the note {USES}/{name} in {store.place} cannot be read",
                remedy="remove it if no run of that name is in progress",
            ) from error
        if use.is_over(age):
            with contextlib.suppress(OSError):
                notes.remove(name)
        else:
            uses.append(use)
    return uses


def used_artifacts(uses: Iterable[Use]) -> dict[ArtifactRef, str]:
    """Each used artifact, and by whom."""
    return {
        ref: f"the run {use.run_id} in progress on {use.host} uses it"
        for use in uses
        for ref in use.artifacts
    }
