"""Garbage collection on a real folder: moved, kept, undone, removed, and killed on the way."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.artifacts import ArtifactRef, Manifest
from eagle3_core.errors import FolderInUseError, StoreError
from eagle3_core.sections import RetentionConfig
from eagle3_core.store import collect
from eagle3_core.store.collect import GcReport, collect_garbage, restore
from eagle3_core.store.condemned import condemn, pardon
from eagle3_core.store.files import file_problem
from eagle3_core.store.local import LocalStore
from eagle3_core.store.locks import folder_lock
from eagle3_core.store.trash import FolderTrash, find_entry
from eagle3_core.store.uses import RunUse, end_use
from tests.disks import small_disk
from tests.kills import num_kills
from tests.store.artifacts import NOW, Chain, add, add_run

OLD = RetentionConfig(older_than_days=14)
NOTHING = RetentionConfig()
KILLS = num_kills()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def runs(store: LocalStore) -> tuple[Chain, Chain]:
    """An old run that a newer one replaces."""
    return add_run(store, "a", age_days=30), add_run(store, "b", age_days=1)


def gc(store: LocalStore, policy: RetentionConfig = OLD, **given: Any) -> GcReport:
    return collect_garbage(store, policy, now=given.pop("now", NOW), **given)


def actions(report: GcReport) -> dict[str, str]:
    return {line.artifact: line.action for line in report.lines}


def names(refs: set[ArtifactRef]) -> set[str]:
    return {str(ref) for ref in refs}


def test_what_goes_is_out_of_sight_at_once_and_still_there(store, runs):
    old, new = runs
    report = gc(store)
    assert {name for name, action in actions(report).items() if action == "to trash"} == names(old.refs)
    assert set(store.refs()) == new.refs
    assert {entry.ref for entry in store.trash().entries()} == old.refs
    assert report.trashed_bytes == sum(line.bytes for line in report.lines if line.action == "to trash") > 0


def test_a_dry_run_says_the_same_and_changes_nothing(store, runs):
    before = sorted(store.root.rglob("*"))
    dry = gc(store, dry_run=True)
    assert sorted(store.root.rglob("*")) == before
    wet = gc(store)
    assert (dry.lines, dry.dry_run) == (wet.lines, True)


def test_an_artifact_comes_back_as_it_was(store, runs):
    old, _ = runs
    before = store.read(old.capture)
    gc(store)
    restore(store, find_entry(store.trash().entries(), old.capture.id[:6]))
    assert store.read(old.capture) == before
    assert store.is_intact(old.capture)
    with store.writer(_plan(before)) as writer:
        assert writer.is_complete


def test_with_a_capture_its_verification_comes_back(store, runs):
    old, _ = runs
    gc(store)
    report = restore(store, find_entry(store.trash().entries(), str(old.capture)))
    assert actions(report) == {str(old.capture): "restored", str(old.verification): "restored"}
    assert store.is_intact(old.verification)


def test_what_was_made_again_is_not_overwritten_by_what_comes_back(store, runs):
    old, _ = runs
    gc(store)
    add_run(store, "a", age_days=0)
    entry = find_entry(store.trash().entries(), str(old.capture))
    with pytest.raises(StoreError, match="again; move that one to the trash first"):
        restore(store, entry)


def test_a_folder_that_a_writer_left_empty_does_not_keep_an_artifact_away(store, runs):
    old, _ = runs
    gc(store)
    with folder_lock(store.folder(old.capture)):
        pass
    restore(store, find_entry(store.trash().entries(), str(old.capture)))
    assert store.is_intact(old.capture)


def test_the_trash_is_emptied_only_when_told_and_of_what_is_old_enough(store, runs):
    old, _ = runs
    gc(store)
    moved = max(entry.moved_at for entry in store.trash().entries())
    assert "purged" not in actions(gc(store, now=moved + timedelta(days=30))).values()
    assert (
        "purged"
        not in actions(gc(store, NOTHING, purge_after_days=7, now=moved + timedelta(days=6))).values()
    )
    report = gc(store, NOTHING, purge_after_days=7, now=moved + timedelta(days=8))
    assert {name for name, action in actions(report).items() if action == "purged"} == names(old.refs)
    assert report.purged_bytes > 0
    assert list((store.root / "trash").iterdir()) == []


def test_purging_does_not_take_what_was_moved_in_the_same_command(store, runs):
    report = gc(store, purge_after_days=0, now=NOW + timedelta(days=3650))
    assert report.purged_bytes == 0
    assert len(store.trash().entries()) == len(runs[0].refs)


def test_an_artifact_that_somebody_writes_is_left_alone(store, runs):
    old, _ = runs
    with folder_lock(store.folder(old.benchmark)):
        report = gc(store)
        assert actions(report)[str(old.benchmark)] == "kept"
        assert any("in use by another process" in line.reasons[0] for line in report.lines)
        with pytest.raises(FolderInUseError):
            gc(store, NOTHING, forced={old.benchmark})
    assert actions(gc(store, NOTHING, forced={old.benchmark}))[str(old.benchmark)] == "to trash"


def test_a_run_in_progress_keeps_what_it_uses_and_what_that_was_made_from(store, runs):
    old, _ = runs
    with RunUse("r") as use:
        use.say(store, [old.checkpoint])
        report = gc(store)
    kept = {old.checkpoint, old.capture, old.verification, old.vocabulary, old.dataset, old.conversations}
    assert kept <= set(store.refs())
    line = next(line for line in report.lines if line.artifact == str(old.checkpoint))
    assert (line.action, line.named) == ("kept", True)
    assert line.reasons[0].startswith("the run r in progress on ")


def test_a_run_that_begins_while_its_artifact_is_moved_gets_it_back(store, runs, monkeypatch):
    old, _ = runs
    seen: list[int] = []

    def began(store: LocalStore) -> list[Any]:
        seen.append(1)
        if len(seen) == 2:  # after the first move, the one of the benchmark
            RunUse("r").say(store, [old.benchmark])
        return uses(store)

    uses = collect.current_uses
    monkeypatch.setattr(collect, "current_uses", began)
    report = gc(store)
    assert actions(report)[str(old.benchmark)] == "kept"
    assert store.is_intact(old.benchmark)


def test_an_unreadable_manifest_stops_policies_and_is_named_and_a_person_can_move_it(store, runs):
    old, new = runs
    (store.folder(new.checkpoint) / "manifest.json").write_text("{")
    report = gc(store)
    assert report.trashed_bytes == 0
    assert "cannot be read" in report.warnings[0]
    assert actions(gc(store, NOTHING, forced={new.checkpoint}))[str(new.checkpoint)] == "to trash"
    gc(store)
    assert set(store.refs()) == new.refs - {new.checkpoint} | {old.checkpoint} & set(store.refs()) | (
        set(store.refs()) & old.refs
    )


def test_what_is_not_in_the_store_cannot_be_forced(store, runs):
    with pytest.raises(StoreError, match="capture/0000000000000000 is not in"):
        gc(store, NOTHING, forced={ArtifactRef(kind="capture", id="0" * 16)})


def test_a_limit_that_cannot_be_met_is_said(store, runs):
    report = gc(store, RetentionConfig(max_bytes=10))
    assert "more than the 10 allowed" in report.warnings[0]


def test_a_trashed_capture_takes_what_was_staged_for_it_along_when_it_is_purged(store, runs):
    old, new = runs
    for ref in (old.capture, new.capture):
        (store.root / "staging" / ref.id).mkdir(parents=True)
    gc(store)
    assert len(list((store.root / "staging").iterdir())) == 2
    gc(store, NOTHING, purge_after_days=0, now=NOW + timedelta(days=3650))
    assert [path.name for path in (store.root / "staging").iterdir()] == [new.capture.id]


def test_killed_at_random_moments_it_loses_nothing_that_stays_and_leaves_no_half_artifact(tmp_path):
    template = LocalStore(tmp_path / "template")
    old, new = add_run(template, "a", age_days=30, size=2000), add_run(template, "b", age_days=1)
    _add_files(template, old.capture, 40)
    seconds = _collected_by_a_child(_copy(template, tmp_path / "timing"), None)
    for number in range(KILLS):
        store = _copy(template, tmp_path / f"kill-{number}")
        _collected_by_a_child(store, random.Random(number).uniform(0, seconds))
        _check_whole(store, old, new)
        _collected_by_a_child(store, None)
        assert set(store.refs()) == new.refs
        assert list((store.root / "trash").iterdir()) == []
        shutil.rmtree(store.root)


def _collected_by_a_child(store: LocalStore, kill_after: float | None) -> float:
    """Move and purge in a process of its own, perhaps killed; returns how long it lived."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"x")
        code = 1
        try:
            gc(store)
            gc(store, NOTHING, purge_after_days=0, now=NOW + timedelta(days=3650))
            code = 0
        finally:
            os._exit(code)
    os.read(reader, 1)
    started = time.monotonic()
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    assert kill_after is not None or status == 0
    return time.monotonic() - started


def _check_whole(store: LocalStore, old: Chain, new: Chain) -> None:
    """What stays is intact; what goes is in its place, in the trash or gone, each whole."""
    assert new.refs <= set(store.refs())
    for ref in store.refs():
        assert store.is_intact(ref)
    for entry in store.trash().entries():
        folder = store.root / "trash" / entry.name
        manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
        assert manifest.ref == entry.ref
        assert entry.ref in old.refs
        assert not any(file_problem(folder, file) for file in manifest.files)


def _copy(template: LocalStore, root: Path) -> LocalStore:
    shutil.copytree(template.root, root)
    return LocalStore(root)


def _add_files(store: LocalStore, ref: ArtifactRef, count: int) -> None:
    manifest = store.read(ref)
    with store.writer(_plan(manifest)) as writer:
        paths = [writer.folder / f"shard-{index:05d}" for index in range(count)]
        for path in paths:
            path.write_bytes(b"x" * 1000)
        added = writer.complete(paths)
    from tests.store.artifacts import replace_manifest

    replace_manifest(store, added.model_copy(update={"provenance": manifest.provenance}))


def _plan(manifest: Manifest) -> Any:
    from eagle3_core.artifacts import ArtifactPlan

    return ArtifactPlan(kind=manifest.ref.kind, identity=manifest.identity, parents=manifest.parents)


def test_what_cannot_be_moved_stays_with_what_it_was_made_from_and_the_others_go(store, runs, monkeypatch):
    old, new = runs
    move = FolderTrash._move

    def stubborn(trash: FolderTrash, source: Path, destination: Path) -> None:
        if source == store.folder(old.export):
            raise StoreError(f"{source} cannot be moved")
        move(trash, source, destination)

    monkeypatch.setattr(FolderTrash, "_move", stubborn)
    report = gc(store)
    line = next(line for line in report.lines if line.artifact == str(old.export))
    assert (line.action, "cannot be moved" in line.reasons[0]) == ("kept", True)
    gone = {old.benchmark}
    assert set(store.refs()) == new.refs | old.refs - gone
    line = next(line for line in report.lines if line.artifact == str(old.capture))
    assert line.reasons == (f"{old.export} was made from it and stays",)


def test_files_without_a_manifest_go_when_nobody_has_touched_them_for_a_day(store, runs):
    ref = ArtifactRef(kind="capture", id="f" * 16)
    (store.folder(ref)).mkdir()
    (store.folder(ref) / "shard-00000").write_bytes(b"x" * 100)
    made = datetime.now(UTC)
    unreferenced = RetentionConfig(unreferenced=True)
    assert actions(gc(store, NOTHING, now=made + timedelta(days=9)))[str(ref)] == "kept"
    assert actions(gc(store, unreferenced, now=made + timedelta(hours=20)))[str(ref)] == "kept"
    with RunUse("r") as use:
        use.say(store, [ref])
        assert actions(gc(store, unreferenced, now=made + timedelta(days=2)))[str(ref)] == "kept"
        end_use(store, "r")
    report = gc(store, unreferenced, now=made + timedelta(days=2))
    assert next(line.bytes for line in report.lines if line.artifact == str(ref)) == 100
    assert not store.folder(ref).exists()


def test_several_at_once_move_everything_once_and_none_fails(store, runs):
    old, new = runs
    children = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                gc(store)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert new.refs <= set(store.refs())
    gc(store)  # what one has found in the hands of another
    assert set(store.refs()) == new.refs
    assert store.without_manifest() == {}
    moved = [entry.ref for entry in store.trash().entries()]
    assert sorted(map(str, moved)) == sorted(names(old.refs))
    assert all(store.trash().manifest(entry).ref == entry.ref for entry in store.trash().entries())


def test_who_wished_for_a_folder_that_another_one_moves_leaves_none_behind(store, runs, monkeypatch):
    """The other one makes it anew with its lock, and cannot remove it while this one's draft lies there."""
    old, _ = runs
    folder = store.folder(old.benchmark)

    @contextlib.contextmanager
    def held_until_now(folder: Path, wait_seconds: float) -> Iterator[None]:
        shutil.rmtree(folder)
        folder.mkdir()
        raise FolderInUseError(f"{folder} is in use")
        yield

    monkeypatch.setattr("eagle3_core.store.trash.folder_lock", held_until_now)
    with pytest.raises(FolderInUseError):
        store.trash().put(old.benchmark, 0)
    assert not folder.exists()


def test_a_full_disk_can_be_emptied(tmp_path):
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        store = LocalStore(disk.path / "store")
        add_run(store, "a", age_days=30, size=1 << 20)
        new = add_run(store, "b", age_days=1)
        for name in ("filler", "one more"):
            with pytest.raises(OSError, match="No space"):
                (disk.path / name).write_bytes(bytes(8 << 20))
        assert (disk.path / "one more").stat().st_size == 0
        assert gc(store).trashed_bytes > 1 << 20
        gc(store, NOTHING, purge_after_days=0, now=NOW + timedelta(days=3650))
        assert set(store.refs()) == new.refs
        (disk.path / "one more").write_bytes(bytes(1 << 20))


def test_nothing_is_named_twice(store):
    add(store, "capture", {"target": "t"}, age_days=3)
    report = gc(store, NOTHING)
    assert [line.action for line in report.lines] == ["kept"]


def test_a_capture_that_was_found_wrong_after_its_verification_replaces_none(store, runs):
    old, new = runs
    condemn(store, store.read(new.capture), {"content.bin": "of another layer"})
    assert actions(gc(store))[str(old.capture)] == "kept"
    pardon(store, store.read(new.capture))
    assert actions(gc(store))[str(old.capture)] == "to trash"
