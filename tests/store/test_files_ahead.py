"""Files in a known order: one in use, one on its way, and none left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan, Manifest
from eagle3_core.errors import StoreError
from eagle3_core.store.files import file_entry
from eagle3_core.store.files_ahead import NUM_FILES, FilesAhead
from eagle3_core.store.local import LocalStore

PLAN = ArtifactPlan(kind="capture", identity={"test": "ahead"})
NAMES = [f"file-{number}" for number in range(4)]


class Watching(LocalStore):
    """Knows which files are open, and how many were at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.open: set[str] = set()
        self.opened: list[str] = []
        self.most = 0

    @contextlib.contextmanager
    def shard_file(self, manifest: Manifest, name: str) -> Iterator[Path]:
        self.open.add(name)
        self.opened.append(name)
        self.most = max(self.most, len(self.open))
        try:
            with super().shard_file(manifest, name) as path:
                yield path
        finally:
            self.open.discard(name)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Watching, Manifest]:
    store = Watching(tmp_path)
    with store.writer(PLAN) as writer:
        for name in NAMES:
            (writer.folder / name).write_text(name)
            writer.record(file_entry(writer.folder, writer.folder / name))
        return store, writer.complete()


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_the_next_file_is_fetched_while_one_is_in_use(stored: tuple[Watching, Manifest]) -> None:
    store, manifest = stored
    with FilesAhead(store, manifest, NAMES) as files:
        for number, name in enumerate(NAMES):
            with files.file(name) as path:
                assert path.read_text() == name
                assert wait_for(lambda: len(store.opened) >= min(number + 2, len(NAMES)))  # noqa: B023
    assert store.opened == NAMES
    assert store.most == NUM_FILES
    assert not store.open


def test_a_file_that_cannot_be_had_is_told_in_its_turn_and_the_next_ones_come(
    stored: tuple[Watching, Manifest],
) -> None:
    store, manifest = stored
    (store.folder(PLAN.ref) / NAMES[1]).unlink()
    seen = []
    with FilesAhead(store, manifest, NAMES) as files:
        for name in NAMES:
            try:
                with files.file(name) as path:
                    seen.append(path.name)
            except StoreError as error:
                seen.append(str(error).partition(";")[0].rpartition("/")[2])
    assert seen == [NAMES[0], f"{NAMES[1]} is missing", NAMES[2], NAMES[3]]
    assert not store.open


def test_whoever_leaves_early_leaves_no_file_open(stored: tuple[Watching, Manifest]) -> None:
    store, manifest = stored
    with (
        pytest.raises(KeyError),
        FilesAhead(store, manifest, NAMES) as files,
        files.file(NAMES[0]),
    ):
        raise KeyError
    assert not store.open
