"""Notes and trash of a store in a bucket.

A bucket cannot move folders, so only an artifact's manifest goes to the trash: without it nobody sees the
artifact, and its other objects stay where they are until it is purged or restored.

    trash/<time>-<kind>-<id>     the manifest of an artifact in the trash
    trash/.purging-...           says that its objects are being removed
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from pydantic import ValidationError

from eagle3_core.artifacts import ArtifactRef, Manifest
from eagle3_core.errors import FolderInUseError, StoreError
from eagle3_core.store.lease import LEASE_NAME, hold_lease
from eagle3_core.store.local import MANIFEST_NAME
from eagle3_core.store.locks import folder_lock
from eagle3_core.store.objects import ObjectClient
from eagle3_core.store.trash import PURGING, STAGING, TRASH, TrashEntry
from eagle3_core.store.uploads import abort_uploads, object_problem


class ObjectNotes:
    """Notes as small objects below one prefix; ages are the server's."""

    def __init__(self, client: ObjectClient, place: str) -> None:
        self._client, self._place = client, place

    def write(self, name: str, text: str) -> None:
        """Replace a note in one step."""
        self._client.put_bytes(self._key(name), text.encode())

    def read(self, name: str) -> str | None:
        """Its text, or None."""
        found = self._client.get_bytes(self._key(name))
        return found[0].decode(errors="replace") if found else None

    def ages(self) -> dict[str, float]:
        """Names of all notes, and the seconds since each was written or touched."""
        keys = sorted(self._client.list(self._key("")))
        ages: dict[str, float] = {}
        for key, facts in zip(keys, self._client.heads(keys), strict=True):
            if isinstance(facts, StoreError):
                raise facts
            if facts is not None:
                ages[key[len(self._key("")) :]] = facts.age_seconds
        return ages

    def touch(self, name: str) -> None:
        """Make a note young again; one that is gone, or goes this moment, stays so."""
        found = self._client.get_bytes(self._key(name))
        if found is not None:
            self._client.put_bytes(self._key(name), found[0], replaces=found[1].etag)

    def remove(self, name: str) -> None:
        """Remove a note, if it is there."""
        self._client.delete([self._key(name)])

    def _key(self, name: str) -> str:
        return f"{self._place}/{name}"


class ObjectTrash:
    """The trash of a store in a bucket.

    Args:
        client: of the bucket.
        mirror: the store's local mirror; what is purged leaves it too.
    """

    def __init__(self, client: ObjectClient, mirror: Path) -> None:
        self._client, self._mirror = client, mirror

    def put(self, ref: ArtifactRef, size: int) -> TrashEntry | None:
        """Take an artifact's manifest away, under its lease: at once nobody sees the artifact.

        None if another process has just done so.

        Raises:
            FolderInUseError: somebody writes it.
        """
        entry = TrashEntry.of(ref, size)
        with hold_lease(self._client, str(ref), wait_seconds=0.0) as lease:
            found = self._client.get_bytes(f"{ref}/{MANIFEST_NAME}")
            if found is None:
                return None
            self._client.put_bytes(f"{TRASH}/{entry.name}", found[0])
            lease.check()
            self._client.delete([f"{ref}/{MANIFEST_NAME}"])
        return entry

    def entries(self) -> list[TrashEntry]:
        """What can be restored, oldest first; bytes as the manifests say.

        A manifest that lies both here and in its place, because a crash came between, is in its place.
        """
        keys = sorted(self._client.list(f"{TRASH}/"))
        texts = self._client.get_many(keys)
        found = (
            TrashEntry.parse(key.removeprefix(f"{TRASH}/"), _bytes(text))
            for key, text in zip(keys, texts, strict=True)
            if text is not None
        )
        return [entry for entry in found if entry is not None]

    def manifest(self, entry: TrashEntry) -> Manifest:
        """The manifest of an artifact in the trash.

        Raises:
            StoreError: it cannot be read.
        """
        key = f"{TRASH}/{entry.name}"
        found = self._client.get_bytes(key)
        try:
            return Manifest.model_validate_json(found[0] if found else b"")
        except ValidationError as error:
            url, reason = self._client.url(key), " ".join(str(error).split())
            raise StoreError(f"the manifest {url} cannot be read ({reason})") from error

    def restore(self, entry: TrashEntry) -> None:
        """Put an artifact's manifest back.

        Raises:
            StoreError: it has been made again meanwhile, is gone from the trash, or its objects are no longer
                those that the manifest names, because a writer that began it anew has replaced some.
        """
        key = f"{TRASH}/{entry.name}"
        found = self._client.get_bytes(key)
        if found is None:
            raise StoreError(
                f"{entry.name} is not in the trash of {self._client.root}", remedy="`eagle3 gc` lists what is"
            )
        with hold_lease(self._client, str(entry.ref), wait_seconds=0.0):
            if self._client.head(f"{entry.ref}/{MANIFEST_NAME}") is not None:
                raise StoreError(
                    f"{entry.ref} is in {self._client.root} again", remedy="move that one to the trash first"
                )
            self._check_objects(entry)
            self._client.put_bytes(f"{entry.ref}/{MANIFEST_NAME}", found[0])
            self._client.delete([key])

    def _check_objects(self, entry: TrashEntry) -> None:
        files = self.manifest(entry).files
        keys = [f"{entry.ref}/{file.path}" for file in files]
        for file, key, facts in zip(files, keys, self._client.heads(keys), strict=True):
            if isinstance(facts, StoreError):
                raise facts
            if problem := object_problem(self._client.url(key), file, facts):
                raise StoreError(
                    f"{entry.name} cannot be restored: {problem}",
                    remedy=f"run the stage that makes the {entry.ref.kind}",
                )

    def purge(self, entry: TrashEntry) -> None:
        """Remove an artifact for good: first its name in the trash, then its objects.

        Of one that is in its place again only the name in the trash goes: the objects may be in use.

        Raises:
            StoreError: they cannot be removed, or somebody writes the artifact.
        """
        marker = f"{TRASH}/{PURGING}{entry.name}"
        with hold_lease(self._client, str(entry.ref), wait_seconds=0.0) as lease:
            self._client.put_bytes(marker, b"")
            self._client.delete([f"{TRASH}/{entry.name}"])
            others = [one for one in self.entries() if one.ref == entry.ref]
            if not others and self._client.head(f"{entry.ref}/{MANIFEST_NAME}") is None:
                self._client.run(abort_uploads(self._client, f"{entry.ref}/"))
                lease.check()
                keys = self._client.list(f"{entry.ref}/")
                self._client.delete([key for key in keys if key != f"{entry.ref}/{LEASE_NAME}"])
                self._clear_mirror(entry.ref)
            self._client.delete([marker])

    def _clear_mirror(self, ref: ArtifactRef) -> None:
        """Remove the local files too, unless a process of this host waits to write the artifact."""
        folder = self._mirror / ref.kind / ref.id
        with contextlib.suppress(StoreError):
            if folder.is_dir():
                with folder_lock(folder, wait_seconds=0.0):
                    shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(self._mirror / STAGING / ref.id, ignore_errors=True)

    def finish(self) -> None:
        """Go on with interrupted purges, and take away names of what a crash left in its place too.

        One that was begun anew has another manifest, and what is in the trash can still be restored once that
        one is moved. What somebody writes at this moment is left for the next time.
        """
        for key in self._client.list(f"{TRASH}/{PURGING}"):
            entry = TrashEntry.parse(key.removeprefix(f"{TRASH}/{PURGING}"))
            if entry is not None:
                with contextlib.suppress(FolderInUseError):
                    self.purge(entry)
        for entry in self.entries():
            if not self._is_in_place(entry):
                continue
            with (
                contextlib.suppress(FolderInUseError),
                hold_lease(self._client, str(entry.ref), wait_seconds=0.0),
            ):
                if self._is_in_place(entry):
                    self._client.delete([f"{TRASH}/{entry.name}"])

    def _is_in_place(self, entry: TrashEntry) -> bool:
        there = self._client.get_bytes(f"{entry.ref}/{MANIFEST_NAME}")
        here = self._client.get_bytes(f"{TRASH}/{entry.name}") if there else None
        return there is not None and here is not None and there[0] == here[0]


def _bytes(text: bytes | None) -> int:
    try:
        return Manifest.model_validate_json(text or b"").bytes
    except ValidationError:
        return 0
