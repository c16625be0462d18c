"""Writes one artifact of a bucket: files into the mirror, their uploads in the background, manifests last."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle3_core.artifacts import ArtifactPlan, FileEntry, Manifest
from eagle3_core.errors import StoreError
from eagle3_core.store.condemned import condemned, pardon
from eagle3_core.store.files import file_entry, file_problem
from eagle3_core.store.lease import LEASE_NAME
from eagle3_core.store.local import MANIFEST_NAME, ArtifactWriter, strangers, tell_remade
from eagle3_core.store.progress import Progress
from eagle3_core.store.uploader import Uploader

if TYPE_CHECKING:
    from eagle3_core.store.remote import RemoteStore

logger = logging.getLogger(__name__)


class Hold(Protocol):
    """Something that this process must still hold whenever it writes a manifest or progress."""

    def check(self) -> None:
        """Raise `FolderInUseError` if another process has taken it over."""
        ...


class RemoteWriter(ArtifactWriter):
    """As `ArtifactWriter`; used inside `RemoteStore.writer`.

    `files` starts from what the bucket holds, proven, and what lies intact in the mirror, which is uploaded
    again. A file that was recorded may not be changed until the block ends.
    """

    def __init__(
        self,
        store: RemoteStore,
        plan: ArtifactPlan,
        found: Manifest | None,
        run_id: str | None,
        holds: Sequence[Hold],
    ) -> None:
        """`holds` are those of the mirror's folder and of the bucket's artifact."""
        self.folder, self.ref = store.folder(plan.ref), plan.ref
        self._remote, self._plan, self._run_id = store, plan, run_id
        self._lock = _All(holds)  # type: ignore[assignment]
        self._folder_lock = holds[0]
        self._putting = threading.Lock()
        mirrored = store.mirrored(plan.ref)
        latest = found or mirrored
        self.earlier_seconds = (latest.provenance.seconds or 0.0) if latest else 0.0
        self.facts: dict[str, Any] = dict(latest.facts) if latest else {}
        bad = store.problems(found) if found else {}
        self._proven = {
            entry.path: entry for entry in (found.files if found else ()) if entry.path not in bad
        }
        self.is_complete = found is not None and found.state == "complete" and not bad
        self._drop_shards(self._proven)
        intact = self._intact_here([manifest for manifest in (found, mirrored) if manifest])
        here = {entry.path for entry in intact}
        lost = {path: problem for path, problem in bad.items() if path not in here}
        tell_remade(lost)
        for path in lost:
            (self.folder / path).unlink(missing_ok=True)
        self.files: dict[str, FileEntry] = self._proven | {entry.path: entry for entry in intact}
        self._latest = latest
        self._uploader = Uploader(store.enduring, int(store.settings.upload_backlog_bytes), self._take_proven)
        self.progress = Progress(store.client, self.folder, str(self.ref), self._lock.check)
        if not self.is_complete:
            self._begin(intact, is_new=found is None)

    def _intact_here(self, manifests: Sequence[Manifest]) -> list[FileEntry]:
        """Files that the bucket lacks and the mirror has, whole and not condemned; the last manifest wins."""
        if self.is_complete:
            return []
        here: dict[str, FileEntry] = {}
        for manifest in manifests:
            wanted = [entry for entry in manifest.files if entry.path not in self._proven]
            wrong = condemned(self._remote, manifest) if wanted else {}
            here |= {entry.path: entry for entry in wanted if entry.path not in wrong}
        return [entry for entry in here.values() if not file_problem(self.folder, entry)]

    def _begin(self, intact: Sequence[FileEntry], is_new: bool) -> None:
        try:
            self.progress.fetch()
            if intact or is_new:
                self._latest = self._write("partial", None)
            if is_new:  # nothing lies in a bucket without a manifest by which it is found and collected
                self._put_proven()
            for entry in intact:
                self._upload(entry)
        except BaseException:
            self.close()
            raise

    @property
    def waiting_bytes(self) -> int:
        """Bytes of recorded files that wait for their upload or its proof."""
        return self._uploader.waiting_bytes

    def record(self, entry: FileEntry, seconds: float | None = None) -> None:
        """Add a finished file and begin its upload; waits while the backlog is full.

        Raises:
            FolderInUseError: another process has taken the artifact over.
            StoreError: an earlier upload has failed.
        """
        self.files[entry.path] = entry
        self._latest = self._write("partial", seconds)
        self._upload(entry)

    def check_held(self) -> None:
        """Of the mirror's folder alone: whoever writes there may go on while the bucket is out of reach."""
        self._folder_lock.check()

    def save_progress(self, position: int, files: Sequence[str], growing: Sequence[str] = ()) -> None:
        """Put what a resume needs in the bucket, in the background, so that another host can go on.

        Raises:
            FolderInUseError: the save before found that another process has taken the artifact over.
        """
        self.progress.save(position, files, growing)

    def complete(self, files: Iterable[Path] = (), seconds: float | None = None, **facts: Any) -> Manifest:
        """Hash and upload `files`, wait until the bucket holds everything, and mark the artifact complete.

        Raises:
            FolderInUseError: another process has taken the artifact over.
            StoreError: an upload has failed.
        """
        for path in files:
            entry = file_entry(self.folder, path)
            self.files[entry.path] = entry
            self._latest = self._write("partial", seconds)
            self._upload(entry)
        self.facts |= facts
        self.drain()
        self.progress.close()
        self.files = {path: self._proven[path] for path in self.files}
        manifest = self._write("complete", seconds)
        self._put(manifest)
        pardon(self._remote, manifest)
        # Not before: as long as the manifest does not say complete, a resume needs these files.
        for path in strangers(self.folder, manifest):
            path.unlink(missing_ok=True)
        self._remove_strange_objects(manifest)
        return manifest

    def drain(self) -> None:
        """Wait until all that was recorded is in the bucket.

        Raises:
            StoreError: an upload has failed.
        """
        self._uploader.drain()

    def close(self) -> None:
        """Cancel what is on its way; nothing of it stays in the bucket."""
        self._uploader.close()
        self.progress.close()

    def _upload(self, entry: FileEntry) -> None:
        self._uploader.add(self.folder / entry.path, f"{self.ref}/{entry.path}", entry)

    def _take_proven(self, entries: Sequence[FileEntry]) -> None:
        """Name proven files in the bucket's manifest; then the local copies of shards may go."""
        for entry in entries:
            self._proven[entry.path] = entry
            if entry.path in self.files:
                self.files[entry.path] = entry
        self._put_proven()
        self._drop_shards(entry.path for entry in entries)

    def _drop_shards(self, paths: Iterable[str]) -> None:
        """Remove the local copies of shards or labels that the bucket holds and its manifest names."""
        if self.ref.kind in ("capture", "labels"):
            for path in paths:
                (self.folder / path).unlink(missing_ok=True)

    def _put_proven(self) -> None:
        """Put the manifest of what the bucket holds so far."""
        assert self._latest is not None
        proven = tuple(self._proven[path] for path in sorted(self._proven) if path in self.files)
        self._put(self._latest.model_copy(update={"state": "partial", "files": proven}))

    def _put(self, manifest: Manifest) -> None:
        with self._putting:
            self._lock.check()
            content = manifest.model_dump_json(indent=1).encode()
            self._remote.enduring.put_bytes(f"{self.ref}/{MANIFEST_NAME}", content)

    def _remove_strange_objects(self, manifest: Manifest) -> None:
        """Remove what the complete manifest does not name; if that fails it is only space."""
        keep = {MANIFEST_NAME, LEASE_NAME, *(entry.path for entry in manifest.files)}
        cut = len(f"{self.ref}/")
        try:
            keys = [key for key in self._remote.client.list(f"{self.ref}/") if key[cut:] not in keep]
            self._remote.client.delete(keys)
        except StoreError as error:
            logger.warning("objects that %s does not name stay in the bucket: %s", self.ref, error)


class _All:
    """Several holds as one."""

    def __init__(self, holds: Sequence[Hold]) -> None:
        self._holds = holds

    def check(self) -> None:
        for hold in self._holds:
            hold.check()
