"""What the runs of this host have yet to write, so that none counts on the space of another.

Each run keeps a file in a folder that all runs of the host see: its owner, and the bytes that it has yet to
write on each file system. It is replaced while the run writes, so that what lies on the disk already is not
counted again. The reservation of a process that is gone counts for nothing and is removed by whoever sees
it; where that cannot be known (another container's process), by its age.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3_core.config import resolve_path
from eagle3_core.errors import HostError
from eagle3_core.host.process_tree import ProcessId, boot_id
from eagle3_core.host.volume import Volume

STALE_SECONDS = 900.0
SUFFIX = ".json"


class Reservation(BaseModel):
    """What one run has yet to write."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run_id: str
    owner: ProcessId
    boot: str = Field(description="Boot id of the owner's host.")
    since: datetime = Field(description="When the run began; the earlier one has the space.")
    needs: dict[str, dict[str, int]] = Field(
        description="Bytes by file system (`Volume.key`) and by what they are for: an artifact or a role."
    )

    def is_dead(self, age_seconds: float) -> bool:
        """Whether its run is gone.

        Args:
            age_seconds: since it was last written.
        """
        here = self.boot == boot_id() and self.owner.namespace == ProcessId.current().namespace
        return self.owner.is_gone() if here else age_seconds > STALE_SECONDS


def reservations_folder(setting: str | None) -> Path:
    """Where the reservations of this host lie: `limits.reservations`, else in the user's state folder."""
    if setting:
        return resolve_path(setting)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "eagle3" / "reservations"


class Reservations:
    """The reservations of this host.

    Args:
        setting: `limits.reservations`.
    """

    def __init__(self, setting: str | None) -> None:
        self.folder = reservations_folder(setting)

    def reserve(self, run_id: str, needs: dict[str, dict[str, int]]) -> Reservation:
        """Reserve for a run of this process, or change what it has reserved.

        Raises:
            HostError: the folder cannot be written.
        """
        earlier = self.find(run_id)
        reservation = Reservation(
            run_id=run_id,
            owner=ProcessId.current(),
            boot=boot_id(),
            since=earlier.since if earlier else datetime.now(UTC),
            needs={key: {what: size for what, size in need.items() if size} for key, need in needs.items()},
        )
        path = self._path(run_id)
        draft = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(reservation.model_dump_json(indent=1))
            draft.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise HostError(
                f"cannot reserve space in {self.folder} ({error.strerror or error})",
                remedy="set limits.reservations to a folder that can be written",
            ) from error
        return reservation

    def release(self, run_id: str) -> None:
        """A run has ended."""
        with contextlib.suppress(OSError):
            self._path(run_id).unlink(missing_ok=True)

    def find(self, run_id: str) -> Reservation | None:
        """The reservation of one run, or None."""
        return _read(self._path(run_id))

    def all(self) -> list[Reservation]:
        """Those of living runs, the earliest first; dead ones are removed."""
        found = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            reservation = _read(path)
            if reservation is None:
                continue
            with contextlib.suppress(OSError):
                if reservation.is_dead(time.time() - path.stat().st_mtime):
                    path.unlink(missing_ok=True)
                else:
                    found.append(reservation)
        return sorted(found, key=lambda one: (one.since, one.run_id))

    def others(
        self, run_id: str | None, volume: Volume, same: frozenset[str] = frozenset()
    ) -> dict[str, int]:
        """Bytes on a file system that other runs have yet to write, by run.

        Args:
            run_id: whose reservation is left out.
            volume: the file system.
            same: artifacts that this run would write too: both write them once.
        """
        found = {}
        for one in self.all():
            need = one.needs.get(volume.key, {})
            size = sum(bytes_ for what, bytes_ in need.items() if what not in same)
            if size and one.run_id != run_id:
                found[one.run_id] = size
        return found

    def before(self, run_id: str, volume: Volume) -> dict[str, int]:
        """What runs that reserved earlier than this one have yet to write on a file system, by run.

        Of two runs that do not fit together the later one waits, never both. One without a reservation of its
        own has come last.
        """
        everyone = self.all()
        own = next((one for one in everyone if one.run_id == run_id), None)
        same = frozenset(own.needs.get(volume.key, {})) if own else frozenset()
        earlier = {
            one.run_id for one in everyone if own is None or (one.since, one.run_id) < (own.since, run_id)
        }
        found = self.others(run_id, volume, same)
        return {name: size for name, size in found.items() if name in earlier}

    def _path(self, run_id: str) -> Path:
        return self.folder / f"{run_id}{SUFFIX}"


def _read(path: Path) -> Reservation | None:
    try:
        return Reservation.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
