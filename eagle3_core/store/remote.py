"""The artifact store in a bucket: `s3://bucket/prefix/<kind>/<id>/` with the files and a `manifest.json`.

What the bucket's manifests say is the truth. The local mirror is where files are written before they are
uploaded, and a cache of small artifacts; it can be removed at any time at which nobody writes. Shards of a
capture leave it as soon as the bucket holds them, proven by size and hash, and its manifest names them.

    file finished -> recorded in the mirror's manifest -> uploaded -> proven -> named by the bucket's manifest
                                                                             -> a shard's local copy removed
"""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_core.artifacts import (
    ARTIFACT_KINDS,
    ID_LENGTH,
    ArtifactPlan,
    ArtifactRef,
    FileEntry,
    Manifest,
    differing_keys,
)
from eagle3_core.config import ObjectRoot
from eagle3_core.errors import ObjectStoreError, StoreError
from eagle3_core.host.process_tree import ProcessId
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store.condemned import condemned
from eagle3_core.store.files import file_entry, file_problem, remove_temporary_files, write_atomic
from eagle3_core.store.lease import hold_lease
from eagle3_core.store.local import MANIFEST_NAME, LocalStore, parse_manifest
from eagle3_core.store.locks import folder_lock
from eagle3_core.store.objects import ObjectClient
from eagle3_core.store.remote_writer import RemoteWriter
from eagle3_core.store.uploads import abort_uploads, object_problem, try_parts, upload

if TYPE_CHECKING:
    from eagle3_core.store.notes import Notes
    from eagle3_core.store.trash import Trash

SCRATCH = "scratch"
OWNER_NAME = "owner"
WRITE_TEST_ATTEMPTS = 3
MANIFEST_KEY = re.compile(
    rf"^((?:{'|'.join(ARTIFACT_KINDS)})/[0-9a-f]{{{ID_LENGTH}}})/{re.escape(MANIFEST_NAME)}$"
)


class RemoteStore(LocalStore):
    """Artifacts in a bucket, with a local mirror.

    Args:
        place: bucket and prefix.
        mirror: the local folder; `folder(ref)` lies in it.
        settings: how the bucket is reached.
    """

    def __init__(self, place: ObjectRoot, mirror: Path, settings: ObjectStoreConfig) -> None:
        super().__init__(mirror)
        self.settings = settings
        self.client = ObjectClient(place, settings)
        self.enduring = self.client.enduring(settings.outage_minutes * 60)

    @property
    def place(self) -> str:
        """Where the artifacts are, as a person names it."""
        return str(self.client.root)

    def fetch(self, ref: ArtifactRef) -> Path:
        """The mirror's folder with all files of a complete artifact; what is missing or stale is downloaded.

        Raises:
            StoreError: missing or not complete, or the bucket has lost a file.
        """
        for entry in self.read(ref).files:
            self.fetch_file(ref, entry)
        return self.folder(ref)

    def fetch_file(self, ref: ArtifactRef, entry: FileEntry) -> Path:
        """One file of an artifact in the mirror, downloaded if it is not there or not what it should be."""
        path = self.folder(ref) / entry.path
        if file_problem(self.folder(ref), entry):
            self.client.get_file(object_key(ref, entry.path), path, entry.bytes, entry.xxh3_128)
        return path

    @contextlib.contextmanager
    def shard_file(self, manifest: Manifest, name: str) -> Iterator[Path]:
        """One whole, hash-checked file of an artifact, for as long as the block lasts.

        Raises:
            StoreError: the manifest does not name it, or the bucket has lost or damaged it.
        """
        entry = manifest.file(name)
        if entry is None:
            raise StoreError(f"{manifest.ref} has no file {name}", remedy="list its manifest's files")
        if not file_problem(self.folder(manifest.ref), entry):
            yield self.folder(manifest.ref) / name
            return
        path = self._scratch() / f"{uuid.uuid4().hex}-{Path(name).name}"
        try:
            self.enduring.get_file(object_key(manifest.ref, name), path, entry.bytes, entry.xxh3_128)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def read_range(self, ref: ArtifactRef, path: str, start: int, length: int) -> bytes:
        """Bytes `[start, start + length)` of one file of an artifact, not checked against any hash.

        Raises:
            StoreError: the bucket has lost the file, it is shorter, or it cannot be reached.
        """
        return self.enduring.read_range(object_key(ref, path), start, length)

    def read_into(self, ref: ArtifactRef, path: str, start: int, block: memoryview) -> None:
        """As `read_range`, into memory of the caller, which is filled."""
        block[:] = self.read_range(ref, path, start, len(block))

    def find(self, ref: ArtifactRef) -> Manifest | None:
        """The bucket's manifest, partial or complete, or None.

        Raises:
            StoreError: it cannot be reached or read, or belongs to another artifact.
        """
        found = self.client.get_bytes(object_key(ref, MANIFEST_NAME))
        return None if found is None else self._parse(ref, found[0])

    def mirrored(self, ref: ArtifactRef) -> Manifest | None:
        """The mirror's manifest, which may name files that are not in the bucket yet; None without one."""
        try:
            return super().find(ref)
        except StoreError:
            return None

    def problems(self, manifest: Manifest) -> dict[str, str]:
        """For each file that the bucket has lost or that is another than was proven: path and what is wrong.

        Nothing is downloaded: size and checksum are compared with what was recorded with the proof.

        Raises:
            ObjectStoreError: the bucket cannot be asked.
        """
        keys = [object_key(manifest.ref, entry.path) for entry in manifest.files]
        problems: dict[str, str] = {}
        for entry, key, facts in zip(manifest.files, keys, self.client.heads(keys), strict=True):
            if isinstance(facts, ObjectStoreError):
                raise facts
            if problem := object_problem(self.client.url(key), entry, facts):
                problems[entry.path] = problem
        return condemned(self, manifest) | problems

    def list(self) -> list[Manifest]:
        """All manifests in the bucket, partial ones too."""
        refs = self.refs()
        found = self.client.get_many([object_key(ref, MANIFEST_NAME) for ref in refs])
        return [self._parse(ref, text) for ref, text in zip(refs, found, strict=True) if text is not None]

    def refs(self) -> tuple[ArtifactRef, ...]:
        """Names of all artifacts that have a manifest, read or not."""
        matches = (MANIFEST_KEY.match(key) for key in sorted(self.client.list("")))
        return tuple(ArtifactRef.parse(match[1]) for match in matches if match)

    def without_manifest(self) -> dict[ArtifactRef, tuple[int, datetime]]:
        """Nothing: in a bucket a writer puts a manifest before anything else."""
        return {}

    def check_writable(self) -> str:
        """Upload, read and delete a small object, and begin and abort an upload in parts.

        Raises:
            ObjectStoreError: what is wrong, in one line: credentials, bucket, permission, server or checksum.
        """
        name = f".write-test-{uuid.uuid4().hex}"
        path = self._scratch() / name
        attempts = min(WRITE_TEST_ATTEMPTS, self.settings.attempts)
        client = ObjectClient(self.client.root, self.settings.model_copy(update={"attempts": attempts}))
        try:
            write_atomic(path, name)
            entry = client.run(upload(client, path, name, file_entry(path.parent, path)))
            if problem := object_problem(client.url(name), entry, client.head(name)):
                raise ObjectStoreError(problem, remedy="use a server that keeps what it is given")
            client.get_file(name, path, entry.bytes, entry.xxh3_128)
            client.run(try_parts(client, name))
            client.delete([name])
        finally:
            path.unlink(missing_ok=True)
        server = self.settings.endpoint_url or "the endpoint of the environment"
        return f"{self.place} at {server} can be written; uploads are proven by {self.settings.checksum}"

    def trash(self) -> Trash:
        """Where artifacts go before they are removed for good."""
        from eagle3_core.store.remote_places import ObjectTrash

        return ObjectTrash(self.client, self.root)

    def notes(self, place: str) -> Notes:
        """Small objects beside the artifacts, e.g. who uses what."""
        from eagle3_core.store.remote_places import ObjectNotes

        return ObjectNotes(self.client, place)

    @contextlib.contextmanager
    def writer(
        self, plan: ArtifactPlan, run_id: str | None = None, wait_seconds: float = 60.0
    ) -> Iterator[RemoteWriter]:
        """Hold the artifact, here and in the bucket, and write into the mirror's folder.

        Uploads that a killed process left open are aborted. At the end of the block all that was recorded is
        in the bucket; an error cancels and aborts what is on its way.

        Raises:
            StoreError: another process writes it, or the bucket holds an artifact of another identity.
        """
        folder = self.folder(plan.ref)
        with (
            folder_lock(folder, wait_seconds, run_id) as lock,
            hold_lease(self.client, str(plan.ref), wait_seconds, run_id) as lease,
        ):
            remove_temporary_files(folder)
            self.client.run(abort_uploads(self.client, f"{plan.ref}/"))
            found = self.find(plan.ref)
            if found is not None and found.identity != plan.identity:
                raise StoreError(
                    f"{self.place}/{plan.ref} holds another artifact: "
                    + "; ".join(differing_keys(plan.identity, found.identity))
                )
            with contextlib.closing(RemoteWriter(self, plan, found, run_id, (lock, lease))) as writer:
                yield writer
                writer.drain()

    def _parse(self, ref: ArtifactRef, text: bytes) -> Manifest:
        url = self.client.url(object_key(ref, MANIFEST_NAME))
        return parse_manifest(text, ref, url, "remove that artifact")

    def _scratch(self) -> Path:
        """A folder for this process's downloads; those of processes that are gone are removed."""
        root, process = self.root / SCRATCH, ProcessId.current()
        mine = root / f"{process.pid}-{process.start_ticks}"
        if not mine.is_dir():
            for owner in root.glob(f"*/{OWNER_NAME}"):
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    maker = ProcessId.parse(owner.read_text())
                    if maker is not None and maker.is_gone():
                        shutil.rmtree(owner.parent, ignore_errors=True)
            write_atomic(mine / OWNER_NAME, str(process))
        return mine


def object_key(ref: ArtifactRef, path: str) -> str:
    """The key, below the store's prefix, of an artifact's file."""
    return f"{ref}/{path}"
