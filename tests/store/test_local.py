"""Artifacts in a local folder: partial, complete, damaged, foreign."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan, ArtifactRef
from eagle3_core.errors import StoreError
from eagle3_core.leftovers import remove_leftovers
from eagle3_core.store.files import file_entry
from eagle3_core.store.local import MANIFEST_NAME, MAX_WARNINGS, LocalStore

pytestmark = pytest.mark.both


PLAN = ArtifactPlan(kind="capture", identity={"aux_layer_ids": [2, 4, 5]})


def write_file(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content)
    return path


def interrupted(store: LocalStore) -> Path:
    """A writer that recorded two files and ended."""
    with store.writer(PLAN) as writer:
        for name in ("a", "b"):
            writer.record(file_entry(writer.folder, write_file(writer.folder, name, f"content of {name}")))
    return store.folder(PLAN.ref)


def test_an_artifact_is_read_only_when_complete(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(StoreError, match="is not in"):
        store.read(PLAN.ref)
    interrupted(store)
    with pytest.raises(StoreError, match="not complete"):
        store.read(PLAN.ref)
    with store.writer(PLAN, "run-1") as writer:
        writer.complete(result={"n": 2}, seconds=1.5)
    manifest = store.read(PLAN.ref)
    assert [entry.path for entry in manifest.files] == ["a", "b"]
    assert manifest.facts == {"result": {"n": 2}}
    assert manifest.provenance.run_id == "run-1"
    assert store.is_intact(PLAN.ref)
    assert store.list() == [manifest]


def test_a_writer_goes_on_with_what_is_intact_and_drops_what_is_damaged(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    folder = interrupted(store)
    (folder / "b").write_text("content of B")
    (folder / ".tmp-c.1").write_text("half")
    with store.writer(PLAN) as writer:
        assert list(writer.files) == ["a"]
    assert sorted(path.name for path in folder.iterdir()) == ["a", MANIFEST_NAME]


def test_a_writer_says_of_each_damaged_file_why_it_is_made_again_and_counts_them_if_they_are_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(tmp_path)
    folder = interrupted(store)
    (folder / "b").write_text("content of B")
    with store.writer(PLAN) as writer:
        assert [one.getMessage() for one in caplog.records] == [
            f"{folder / 'b'} does not match its hash: made again"
        ]
        for number in range(MAX_WARNINGS + 1):
            name = f"c{number}"
            writer.record(file_entry(folder, write_file(folder, name, name)))
            (folder / name).unlink()
    caplog.clear()
    caplog.set_level("INFO")
    with store.writer(PLAN):
        levels = [one.levelname for one in caplog.records]
    assert levels == [*["WARNING"] * MAX_WARNINGS, "INFO", "WARNING"]
    assert f"{folder / 'c8'} is missing: made again" in caplog.text
    assert "9 files are made again in all" in caplog.text


def test_files_that_are_not_in_the_manifest_do_not_survive_completion(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    folder = interrupted(store)
    write_file(folder, "stranger", "")
    with store.writer(PLAN) as writer:
        writer.complete()
    assert not (folder / "stranger").exists()


def test_problems_name_each_damaged_file_and_no_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with store.writer(PLAN) as writer:
        paths = [write_file(writer.folder, f"file-{i:02d}", "x" * i) for i in range(30)]
        manifest = writer.complete(paths)
    paths[3].write_text("y" * 3)
    paths[17].write_text("")
    paths[29].unlink()
    assert list(store.problems(manifest)) == ["file-03", "file-17", "file-29"]
    assert not store.is_intact(PLAN.ref)


def test_a_folder_of_another_identity_is_never_overwritten(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    folder = interrupted(store)
    text = (folder / MANIFEST_NAME).read_text()
    changed = text.replace("[\n   2,\n   4,\n   5\n  ]", "[1, 3, 6]")
    assert changed != text
    (folder / MANIFEST_NAME).write_text(changed)
    with (
        pytest.raises(StoreError, match=r"aux_layer_ids: \[2, 4, 5\] != \[1, 3, 6\]"),
        store.writer(PLAN),
    ):
        pass
    assert (folder / "a").read_text() == "content of a"


def test_a_manifest_moved_to_another_id_or_cut_short_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    folder = interrupted(store)
    other = ArtifactRef(kind="capture", id="0" * 16)
    store.folder(other).mkdir(parents=True)
    (store.folder(other) / MANIFEST_NAME).write_bytes((folder / MANIFEST_NAME).read_bytes())
    with pytest.raises(StoreError, match="describes"):
        store.find(other)
    (folder / MANIFEST_NAME).write_bytes((folder / MANIFEST_NAME).read_bytes()[:-20])
    with pytest.raises(StoreError, match="cannot be read"):
        store.find(PLAN.ref)


def test_a_writer_killed_while_completing_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    folder = interrupted(store)
    write_file(folder, "resume", "what the next writer needs unless this one has finished")

    def killed(path: Path, missing_ok: bool = False) -> None:
        raise KeyboardInterrupt

    with store.writer(PLAN) as writer, monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            writer.complete()
    assert store.is_intact(PLAN.ref)
    assert (folder / "resume").exists()
    assert list(remove_leftovers(store, [PLAN.ref])[0]) == [str(folder / "resume")]
    assert store.is_intact(PLAN.ref)


def test_what_an_interrupted_writer_needs_is_not_left_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    folder = interrupted(store)
    write_file(folder, "resume", "")
    assert remove_leftovers(store, [PLAN.ref]) == ({}, [])
    assert (folder / "resume").exists()


def test_a_writer_that_waited_sees_that_the_artifact_is_complete(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    folder = interrupted(store)
    with store.writer(PLAN) as writer:
        assert not writer.is_complete
        writer.complete()
    with store.writer(PLAN) as writer:
        assert writer.is_complete
    (folder / "a").write_text("damaged")
    with store.writer(PLAN) as writer:
        assert not writer.is_complete
