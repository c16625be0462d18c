"""The trash of a store in a folder: artifacts leave in two phases, and the first can be taken back.

    <root>/trash/<time>-<kind>-<id>/     an artifact's folder, moved there whole under its lock
    <root>/trash/.purging-.../           one that is being removed for good

Each move is one rename, so that a crash at any moment leaves an artifact either in its place or in the trash,
and what is half removed has no name under which anybody looks.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from eagle3_core.artifacts import ARTIFACT_KINDS, ID_LENGTH, ArtifactRef, Manifest
from eagle3_core.errors import FolderInUseError, StoreError
from eagle3_core.store.claims import Claims
from eagle3_core.store.disk import is_no_space
from eagle3_core.store.files import LOCK_NAME, is_lock_file, sync_folder
from eagle3_core.store.local import MANIFEST_NAME, LocalStore
from eagle3_core.store.locks import folder_lock
from eagle3_core.store.tree import folder_bytes

TRASH = "trash"
TIME_FORMAT = "%Y%m%d-%H%M%S-%f"
PURGING = ".purging-"
STAGING = "staging"
ENTRY_NAME = re.compile(
    rf"^(?P<time>\d{{8}}-\d{{6}}-\d{{6}})-(?P<kind>{'|'.join(ARTIFACT_KINDS)})-(?P<id>[0-9a-f]{{{ID_LENGTH}}})$"
)


@dataclass(frozen=True)
class TrashEntry:
    """One artifact in the trash; the same artifact may lie there several times."""

    ref: ArtifactRef
    moved_at: datetime
    bytes: int

    @property
    def name(self) -> str:
        """Its name in the trash."""
        return f"{self.moved_at:{TIME_FORMAT}}-{self.ref.kind}-{self.ref.id}"

    @classmethod
    def parse(cls, name: str, size: int = 0) -> TrashEntry | None:
        """Read a name; None for anything else."""
        match = ENTRY_NAME.match(name)
        if match is None:
            return None
        moved = datetime.strptime(match["time"], TIME_FORMAT).replace(tzinfo=UTC)
        return cls(ArtifactRef(kind=match["kind"], id=match["id"]), moved, size)  # type: ignore[arg-type]

    @classmethod
    def of(cls, ref: ArtifactRef, size: int) -> TrashEntry:
        """An artifact that is moved now."""
        return cls(ref, datetime.now(UTC), size)


class Trash(Protocol):
    """What a store of any place can do with artifacts that are to go."""

    def put(self, ref: ArtifactRef, size: int) -> TrashEntry | None:
        """Make an artifact invisible at once; None if another process has just done so."""
        ...

    def entries(self) -> list[TrashEntry]:
        """What can be restored, oldest first."""
        ...

    def manifest(self, entry: TrashEntry) -> Manifest:
        """The manifest of an artifact in the trash."""
        ...

    def restore(self, entry: TrashEntry) -> None:
        """Put an artifact back."""
        ...

    def purge(self, entry: TrashEntry) -> None:
        """Remove an artifact for good."""
        ...

    def finish(self) -> None:
        """Go on with what an interrupted purge has left."""
        ...


class FolderTrash:
    """The trash of a local store."""

    def __init__(self, store: LocalStore) -> None:
        self._store, self._root = store, store.root / TRASH

    def put(self, ref: ArtifactRef, size: int) -> TrashEntry | None:
        """Move an artifact's folder into the trash, under its lock; None if another process has just done so.

        Raises:
            FolderInUseError: somebody writes it.
            StoreError: it cannot be moved.
        """
        entry, folder = TrashEntry.of(ref, size), self._store.folder(ref)
        if not folder.is_dir():
            return None
        is_there = False
        try:
            with folder_lock(folder, wait_seconds=0.0) as lock:
                lock.check()
                is_there = any(not is_lock_file(path) for path in folder.iterdir())
                if is_there:
                    self._move(folder, self._root / entry.name)
        except OSError as error:
            if not is_no_space(error):
                raise
            _check_free(folder)
            self._move(folder, self._root / entry.name)
            return entry
        finally:  # the lock, or the wish for it, may have made the folder anew
            with contextlib.suppress(OSError):
                folder.rmdir()
        return entry if is_there else None

    def entries(self) -> list[TrashEntry]:
        """What can be restored, oldest first; bytes as they lie on the disk."""
        found = ((path, TrashEntry.parse(path.name)) for path in sorted(self._root.glob("*")))
        return [
            TrashEntry(entry.ref, entry.moved_at, folder_bytes(path))
            for path, entry in found
            if entry is not None
        ]

    def manifest(self, entry: TrashEntry) -> Manifest:
        """The manifest of an artifact in the trash.

        Raises:
            StoreError: it cannot be read.
        """
        path = self._root / entry.name / MANIFEST_NAME
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise StoreError(f"the manifest {path} cannot be read ({error})") from error

    def restore(self, entry: TrashEntry) -> None:
        """Put an artifact back.

        Raises:
            StoreError: it has been made again meanwhile, or is gone from the trash.
        """
        source, folder = self._root / entry.name, self._store.folder(entry.ref)
        if (folder / MANIFEST_NAME).exists():
            raise StoreError(
                f"{entry.ref} is in {self._store.root} again", remedy="move that one to the trash first"
            )
        if not source.is_dir():
            raise StoreError(f"{entry.name} is not in {self._root}", remedy="`eagle3 gc` lists what is")
        if folder.exists():
            self._clear(folder)
        (source / LOCK_NAME).unlink(missing_ok=True)  # before: in its place it would be another's lock
        self._move(source, folder)

    def purge(self, entry: TrashEntry) -> None:
        """Remove an artifact for good: first its name, then its files, and what was staged for it.

        Nobody may be making it again: the caller has looked who uses the store.

        Raises:
            StoreError: it cannot be removed.
        """
        source, doomed = self._root / entry.name, self._root / f"{PURGING}{entry.name}"
        if not source.exists():
            return  # another process has just done so
        self._move(source, doomed)
        _remove(doomed)
        if entry.ref.kind == "capture" and not self._store.folder(entry.ref).exists():
            _remove(self._store.root / STAGING / entry.ref.id)

    def finish(self) -> None:
        """Go on with what an interrupted purge has left."""
        for doomed in sorted(self._root.glob(f"{PURGING}*")):
            _remove(doomed)

    def _clear(self, folder: Path) -> None:
        """Make room where a writer came and left nothing; what it staged has no manifest.

        Raises:
            StoreError: files of a writer that may go on lie there.
        """
        with folder_lock(folder, wait_seconds=0.0):
            strangers = [path.name for path in folder.iterdir() if not is_lock_file(path)]
            if strangers:
                raise StoreError(
                    f"{folder} holds files of an interrupted writer ({', '.join(sorted(strangers)[:3])})",
                    remedy="remove that folder first",
                )
            self._move(folder, self._root / f"{PURGING}{datetime.now(UTC):{TIME_FORMAT}}-empty")
        self.finish()

    def _move(self, source: Path, destination: Path) -> None:
        try:
            destination.parent.mkdir(parents=True, exist_ok=True)
            source.rename(destination)
            sync_folder(source.parent)
            sync_folder(destination.parent)
        except OSError as error:
            apart = error.errno == errno.EXDEV
            raise StoreError(
                f"{source} cannot be moved to {destination} ({error.strerror})",
                remedy="keep the whole store on one file system" if apart else "check permissions",
            ) from error


def _check_free(folder: Path) -> None:
    """On a full disk no lock can be written, by nobody: then it is enough that nobody holds the folder.

    Raises:
        FolderInUseError: somebody does.
    """
    with contextlib.closing(Claims(folder, suffix="", hidden=f"{LOCK_NAME}-")) as claims:
        if claims.is_held_elsewhere(LOCK_NAME):
            raise FolderInUseError(
                f"{folder} is in use by another process ({claims.owner(LOCK_NAME)})",
                remedy="wait for that run or end it",
            )


def expired(entries: Sequence[TrashEntry], now: datetime, days: float) -> list[TrashEntry]:
    """Those that lie in the trash for longer than `days`."""
    return [entry for entry in entries if now - entry.moved_at >= timedelta(days=days)]


def find_entry(
    entries: Sequence[TrashEntry], text: str, manifest: Callable[[TrashEntry], Manifest] | None = None
) -> TrashEntry:
    """The entry of the artifact that a person names by its name in the trash, KIND/ID or ID.

    Of an id its beginning is enough.

    Args:
        entries: what is in the trash.
        text: what the person says.
        manifest: reads the manifest of one of several entries of the artifact: the newest complete one is
            taken. Without it the newest.

    Raises:
        StoreError: none, or several artifacts.
    """
    if not entries:
        raise StoreError(f"{text!r} cannot be restored: the trash is empty")
    matches = [entry for entry in entries if text in (entry.name, str(entry.ref))]
    if not matches:
        matches = [entry for entry in entries if entry.ref.is_named(text)]
    if len({entry.ref for entry in matches}) != 1:
        found = ", ".join(sorted({str(entry.ref) for entry in matches or entries})[:5])
        raise StoreError(f"{text!r} names no single artifact in the trash", expected=f"one of: {found}")
    matches.sort(key=lambda entry: entry.moved_at)
    whole = [entry for entry in matches if manifest and len(matches) > 1 and _is_complete(manifest, entry)]
    return (whole or matches)[-1]


def _is_complete(manifest: Callable[[TrashEntry], Manifest], entry: TrashEntry) -> bool:
    try:
        return manifest(entry).state == "complete"
    except StoreError:
        return False


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{folder} cannot be removed ({error})", remedy="check permissions") from error
