"""What an unfinished artifact needs on another host: its resumable files in the bucket, the last ones only.

A save takes links of the files, so that the writer goes on and may remove them, and uploads them in a thread.
While one save is on its way later ones are only noted locally: the bandwidth decides how often there is one.

    <artifact>/.progress/<save>/    the files of one save; what has not changed stays with the save before
    <artifact>/.progress.json       position, entries and keys of the files; put after them, and before files
                                    of earlier saves are removed, so what it names is there at any moment
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3_core.artifacts import FileEntry
from eagle3_core.errors import Eagle3Error, FolderInUseError
from eagle3_core.store.calls import Call
from eagle3_core.store.files import TEMPORARY_PREFIX, hash_file, write_atomic
from eagle3_core.store.objects import ObjectClient
from eagle3_core.store.uploads import upload

PROGRESS_NAME = ".progress.json"
SAVES = ".progress"
LINK_PREFIX = f"{TEMPORARY_PREFIX}progress-"

logger = logging.getLogger(__name__)


class SavedFile(BaseModel):
    """One file of a save."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    entry: FileEntry
    key: str


class Saved(BaseModel):
    """The content of `.progress.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    position: int
    files: tuple[SavedFile, ...] = ()


class Progress:
    """The resumable files of one artifact.

    Args:
        client: of the bucket.
        folder: the mirror's folder of the artifact.
        prefix: the artifact's prefix in the bucket.
        check_held: raises `FolderInUseError` if another process has taken the artifact over; asked before
            anything is put or removed there.
    """

    def __init__(
        self, client: ObjectClient, folder: Path, prefix: str, check_held: Callable[[], None]
    ) -> None:
        self._client, self._folder, self._prefix = client, folder, prefix
        self._check_held = check_held
        self._taken_over: FolderInUseError | None = None
        self._thread: threading.Thread | None = None
        self._call: Call[FileEntry] | None = None
        self._is_closing = False

    @property
    def is_saving(self) -> bool:
        """Whether a save is on its way to the bucket."""
        return self._thread is not None and self._thread.is_alive()

    def fetch(self) -> bool:
        """Download what the bucket has, where that is further than what lies here; returns whether it was.

        Raises:
            StoreError: the bucket names a file that it has lost.
        """
        there, here = self._remote(), self._local()
        if there is None or (here is not None and here.position >= there.position):
            return False
        for key, entry in ((file.key, file.entry) for file in there.files):
            self._client.get_file(key, self._folder / entry.path, entry.bytes, entry.xxh3_128)
        write_atomic(self._folder / PROGRESS_NAME, there.model_dump_json())
        logger.info("took the progress of %s up to %d from the bucket", self._prefix, there.position)
        return True

    def save(self, position: int, files: Sequence[str], growing: Sequence[str]) -> None:
        """Note a position, and upload its files unless an earlier save is still on its way.

        Args:
            position: grows from save to save, e.g. optimizer steps.
            files: names of files that are replaced whole, never changed.
            growing: names of files that are appended to.

        Raises:
            FolderInUseError: the save before found that another process has taken the artifact over.
        """
        if self._taken_over is not None:
            raise self._taken_over
        write_atomic(self._folder / PROGRESS_NAME, Saved(position=position).model_dump_json())
        if self._is_closing or self.is_saving:
            return
        for name in files:
            self._link(name).unlink(missing_ok=True)
            os.link(self._folder / name, self._link(name))
        for name in growing:
            shutil.copyfile(self._folder / name, self._link(name))
        names = [*growing, *files]
        self._thread = threading.Thread(
            target=self._upload, args=(position, names), name="progress", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End a save that is on its way; the bucket keeps the one before."""
        self._is_closing = True
        if self._call is not None:
            self._call.cancel()
        if self._thread is not None:
            self._thread.join()

    def _link(self, name: str) -> Path:
        return self._folder / f"{LINK_PREFIX}{name}"

    def _upload(self, position: int, names: Sequence[str]) -> None:
        """Put the files, then what names them, then remove the files of the save before."""
        try:
            before = self._remote()
            known = {file.entry.xxh3_128: file for file in (before.files if before else ())}
            place, files = f"{self._prefix}/{SAVES}/{uuid.uuid4().hex}", []
            for entry in map(self._entry, names):
                if self._is_closing:
                    return
                self._check_held()
                same = known.get(entry.xxh3_128)
                if same is not None and same.entry.path == entry.path:
                    files.append(same)
                    continue
                key = f"{place}/{entry.path}"
                self._call = self._client.start(upload(self._client, self._link(entry.path), key, entry))
                if self._is_closing:  # `close` may have come before there was anything to cancel
                    self._call.cancel()
                files.append(SavedFile(entry=self._call.result(), key=key))
            saved = Saved(position=position, files=tuple(files))
            self._check_held()
            self._client.put_bytes(f"{self._prefix}/{PROGRESS_NAME}", saved.model_dump_json().encode())
            self._check_held()
            self._remove_others({file.key for file in files})
        except FolderInUseError as error:
            self._taken_over = error  # its newer owner's progress stays; the next save says so
        except (Eagle3Error, OSError) as error:
            if not self._is_closing:
                logger.warning("the progress of %s is not in the bucket: %s", self._prefix, error)
        finally:
            for name in names:
                self._link(name).unlink(missing_ok=True)

    def _remove_others(self, keep: set[str]) -> None:
        """Remove the files of saves that `.progress.json` does not name, ended or interrupted ones."""
        keys = self._client.list(f"{self._prefix}/{SAVES}/")
        self._client.delete([key for key in keys if key not in keep])

    def _entry(self, name: str) -> FileEntry:
        path = self._link(name)
        return FileEntry(path=name, bytes=path.stat().st_size, xxh3_128=hash_file(path))

    def _remote(self) -> Saved | None:
        found = self._client.get_bytes(f"{self._prefix}/{PROGRESS_NAME}")
        return _parse(found[0]) if found else None

    def _local(self) -> Saved | None:
        try:
            return _parse((self._folder / PROGRESS_NAME).read_bytes())
        except FileNotFoundError:
            return None


def _parse(text: bytes) -> Saved | None:
    try:
        return Saved.model_validate(json.loads(text))
    except (ValueError, ValidationError):
        return None
