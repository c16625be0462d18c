"""The artifact store in a local folder: `<root>/<kind>/<id>/` with the files and a `manifest.json`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from eagle3_core.artifacts import (
    ARTIFACT_KINDS,
    ID_PATTERN,
    ArtifactPlan,
    ArtifactRef,
    FileEntry,
    Manifest,
    differing_keys,
    provenance,
)
from eagle3_core.errors import StoreError
from eagle3_core.store.condemned import condemned, pardon
from eagle3_core.store.files import (
    file_entry,
    file_problem,
    is_lock_file,
    remove_temporary_files,
    write_atomic,
)
from eagle3_core.store.locks import FolderLock, folder_lock
from eagle3_core.store.notes import FolderNotes, Notes
from eagle3_core.store.tree import files_below

if TYPE_CHECKING:
    from eagle3_core.store.trash import Trash

MANIFEST_NAME = "manifest.json"
HASHING_THREADS = 8
MAX_WARNINGS = 8

logger = logging.getLogger(__name__)


class LocalStore:
    """Artifacts below one local folder.

    An artifact is read only when its manifest says `complete`; it is written under its folder's lock.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def place(self) -> str:
        """Where the artifacts are, as a person names it."""
        return str(self.root)

    def folder(self, ref: ArtifactRef) -> Path:
        """Where an artifact's files lie."""
        return self.root / ref.kind / ref.id

    def fetch(self, ref: ArtifactRef) -> Path:
        """The folder with all files of a complete artifact.

        Raises:
            StoreError: missing or not complete.
        """
        self.read(ref)
        return self.folder(ref)

    @contextlib.contextmanager
    def shard_file(self, manifest: Manifest, name: str) -> Iterator[Path]:
        """One whole file of an artifact, for as long as the block lasts; of a remote store a hashed copy.

        Raises:
            StoreError: the manifest does not name it, or it is missing or damaged.
        """
        entry = _entry(manifest, name)
        path = self.folder(manifest.ref) / entry.path
        if not path.is_file():
            raise StoreError(f"{path} is missing", remedy="run the stage that makes it again")
        yield path

    def read_range(self, ref: ArtifactRef, path: str, start: int, length: int) -> bytes:
        """Bytes `[start, start + length)` of one file of an artifact, not checked against any hash.

        Raises:
            StoreError: the file is missing or shorter.
        """
        block = bytearray(length)
        self.read_into(ref, path, start, memoryview(block))
        return bytes(block)

    def read_into(self, ref: ArtifactRef, path: str, start: int, block: memoryview) -> None:
        """As `read_range`, into memory of the caller, which is filled."""
        file = self.folder(ref) / path
        done = 0
        try:
            with file.open("rb", buffering=0) as handle:
                while done < len(block):
                    count = os.preadv(handle.fileno(), [block[done:]], start + done)
                    if not count:
                        break
                    done += count
        except OSError as error:
            raise StoreError(
                f"{file} cannot be read ({error.strerror})", remedy="run the stage that makes it again"
            ) from error
        if done < len(block):
            raise StoreError(
                f"{file} ends at byte {start + done:,}",
                expected=f"{start + len(block):,}",
                remedy="run the stage that makes it again",
            )

    def find(self, ref: ArtifactRef) -> Manifest | None:
        """The manifest, partial or complete, or None.

        Raises:
            StoreError: the manifest cannot be read or belongs to another artifact.
        """
        path = self.folder(ref) / MANIFEST_NAME
        try:
            return parse_manifest(path.read_bytes(), ref, str(path), "remove that folder")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(str(path), error, "remove that folder") from error

    def read(self, ref: ArtifactRef) -> Manifest:
        """The manifest of a complete artifact.

        Raises:
            StoreError: missing or not complete.
        """
        manifest = self.find(ref)
        if manifest is None or manifest.state != "complete":
            what = "is not in" if manifest is None else "is not complete in"
            raise StoreError(f"{ref} {what} {self.place}", remedy="run the stage that makes it")
        return manifest

    def is_intact(self, ref: ArtifactRef) -> bool:
        """Whether the artifact is complete and every file matches its hash."""
        manifest = self.find(ref)
        return manifest is not None and manifest.state == "complete" and not self.problems(manifest)

    def problems(self, manifest: Manifest) -> dict[str, str]:
        """For each file that is missing, of another size or hash, or condemned: path and what is wrong.

        Files are hashed side by side: hashing frees the interpreter lock, and a disk or a network mount
        reads several files faster than one.
        """
        folder = self.folder(manifest.ref)
        with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hash") as pool:
            found = list(pool.map(lambda entry: file_problem(folder, entry), manifest.files))
        problems = zip(manifest.files, found, strict=True)
        return condemned(self, manifest) | {entry.path: problem for entry, problem in problems if problem}

    def list(self) -> list[Manifest]:
        """All manifests below the root, partial ones too."""
        return [manifest for ref in self.refs() if (manifest := self.find(ref))]

    def trash(self) -> Trash:
        """Where artifacts go before they are removed for good."""
        from eagle3_core.store.trash import FolderTrash

        return FolderTrash(self)

    def notes(self, place: str) -> Notes:
        """Small files beside the artifacts, e.g. who uses what."""
        return FolderNotes(self.root / place)

    def without_manifest(self) -> dict[ArtifactRef, tuple[int, datetime]]:
        """Bytes and last change of folders whose writer was killed before its first file was there."""
        found: dict[ArtifactRef, tuple[int, datetime]] = {}
        for kind in ARTIFACT_KINDS:
            for folder in sorted((self.root / kind).glob("*")):
                if re.fullmatch(ID_PATTERN, folder.name) and not (folder / MANIFEST_NAME).exists():
                    with contextlib.suppress(FileNotFoundError):  # somebody is at work there
                        stats = [path.lstat() for path in [folder, *folder.rglob("*")]]
                        size = sum(one.st_size for one in stats if stat.S_ISREG(one.st_mode))
                        changed = datetime.fromtimestamp(max(one.st_mtime for one in stats), UTC)
                        found[ArtifactRef(kind=kind, id=folder.name)] = (size, changed)
        return found

    def refs(self) -> tuple[ArtifactRef, ...]:
        """Names of all artifacts that have a manifest, read or not; beside them lie `trash` and `uses`."""
        paths = (path for kind in ARTIFACT_KINDS for path in self.root.glob(f"{kind}/*/{MANIFEST_NAME}"))
        names = (f"{path.parent.parent.name}/{path.parent.name}" for path in sorted(paths))
        return tuple(ArtifactRef.parse(name) for name in names)

    @contextlib.contextmanager
    def writer(
        self, plan: ArtifactPlan, run_id: str | None = None, wait_seconds: float = 60.0
    ) -> Iterator[ArtifactWriter]:
        """Hold the artifact's folder and write into it; wait at most `wait_seconds` for another writer.

        Raises:
            StoreError: another process writes it, or the folder holds an artifact of another identity.
        """
        with folder_lock(self.folder(plan.ref), wait_seconds, run_id) as lock:
            remove_temporary_files(self.folder(plan.ref))
            found = self.find(plan.ref)
            if found is not None and found.identity != plan.identity:
                raise StoreError(
                    f"{self.folder(plan.ref)} holds another artifact: "
                    + "; ".join(differing_keys(plan.identity, found.identity))
                )
            yield ArtifactWriter(self, plan, found, run_id, lock)


class ArtifactWriter:
    """Writes one artifact; used inside `LocalStore.writer`.

    `files` starts from what an earlier, interrupted writer recorded and still matches its hashes, so that
    the caller can go on with what is missing. `is_complete` is true where another process has made the whole
    artifact while this one waited for the lock: then there is nothing left to do.
    """

    def __init__(
        self,
        store: LocalStore,
        plan: ArtifactPlan,
        found: Manifest | None,
        run_id: str | None,
        lock: FolderLock,
    ) -> None:
        self.folder = store.folder(plan.ref)
        self.ref = plan.ref
        self._home, self._plan, self._run_id, self._lock = store, plan, run_id, lock
        self.earlier_seconds = (found.provenance.seconds or 0.0) if found else 0.0
        bad = store.problems(found) if found else {}
        self.files: dict[str, FileEntry] = {
            entry.path: entry for entry in (found.files if found else ()) if entry.path not in bad
        }
        self.facts: dict[str, Any] = dict(found.facts) if found else {}
        self.is_complete = found is not None and found.state == "complete" and not bad
        tell_remade(bad)
        for path in bad:
            (self.folder / path).unlink(missing_ok=True)

    def record(self, entry: FileEntry, seconds: float | None = None) -> None:
        """Add a finished file to the manifest, which stays partial.

        Raises:
            FolderInUseError: another process has taken the folder over.
        """
        self.files[entry.path] = entry
        self._write("partial", seconds)

    def check_held(self) -> None:
        """Ask whether the folder is still this writer's; called before anything that another must not see.

        Raises:
            FolderInUseError: another process has taken the folder over.
        """
        self._lock.check()

    def save_progress(self, position: int, files: Sequence[str], growing: Sequence[str] = ()) -> None:
        """Say which files of the folder a resume needs: a store in a bucket takes them in the background.

        Args:
            position: grows from save to save, e.g. optimizer steps.
            files: names of files that are replaced whole, never changed, in the order of writing.
            growing: names of files that are appended to.
        """

    def complete(self, files: Iterable[Path] = (), seconds: float | None = None, **facts: Any) -> Manifest:
        """Hash `files`, add them and mark the artifact complete; nothing may be written after.

        Raises:
            FolderInUseError: another process has taken the folder over.
        """
        for path in files:
            entry = file_entry(self.folder, path)
            self.files[entry.path] = entry
        self.facts |= facts
        manifest = self._write("complete", seconds)
        pardon(self._home, manifest)
        # Not before: as long as the manifest does not say complete, a resume needs these files.
        for path in strangers(self.folder, manifest):
            path.unlink(missing_ok=True)
        return manifest

    def _write(self, state: str, seconds: float | None) -> Manifest:
        manifest = Manifest(
            ref=self.ref,
            state=state,  # type: ignore[arg-type]
            identity=self._plan.identity,
            parents=self._plan.parents,
            files=tuple(self.files[path] for path in sorted(self.files)),
            facts=self.facts,
            provenance=provenance(self._run_id, self.earlier_seconds + (seconds or 0.0)),
        )
        content = manifest.model_dump_json(indent=1)
        write_atomic(self.folder / MANIFEST_NAME, content, before_rename=self._lock.check)
        return manifest


def _entry(manifest: Manifest, name: str) -> FileEntry:
    entry = manifest.file(name)
    if entry is None:
        raise StoreError(f"{manifest.ref} has no file {name}", remedy="list its manifest's files")
    return entry


def tell_remade(problems: Mapping[str, str]) -> None:
    """Log of each file that a writer found damaged, missing or condemned why it is made again.

    Args:
        problems: path and what is wrong, as `LocalStore.problems` says it.
    """
    for number, problem in enumerate(problems.values()):
        logger.log(logging.WARNING if number < MAX_WARNINGS else logging.INFO, "%s: made again", problem)
    if len(problems) > MAX_WARNINGS:
        logger.warning("%d files are made again in all; the log names them", len(problems))


def strangers(folder: Path, manifest: Manifest) -> list[Path]:
    """Files of a complete artifact's folder that its manifest does not name (the lock apart)."""
    keep = {MANIFEST_NAME, *(entry.path for entry in manifest.files)}
    return [
        path
        for path in sorted(files_below(folder))
        if path.relative_to(folder).as_posix() not in keep and not is_lock_file(path)
    ]


def parse_manifest(text: bytes, ref: ArtifactRef, place: str, remedy: str) -> Manifest:
    """The manifest of an artifact.

    Args:
        text: its JSON.
        ref: the artifact that it must describe.
        place: where it lies.
        remedy: what to do if it is no manifest.

    Raises:
        StoreError: it is none, or another artifact's.
    """
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise _unreadable(place, error, remedy) from error
    if manifest.ref != ref:
        raise StoreError(f"{place} describes {manifest.ref}", expected=str(ref), remedy="move it back")
    return manifest


def _unreadable(place: str, error: Exception, remedy: str) -> StoreError:
    reason = " ".join(str(error).split())
    return StoreError(f"the manifest {place} cannot be read ({reason})", remedy=remedy)
