"""Files that were found wrong are made anew, whatever their hash says. No torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan, Manifest
from eagle3_core.errors import StoreError
from eagle3_core.store.condemned import condemn, condemned
from eagle3_core.store.files import file_entry
from eagle3_core.store.local import LocalStore

PLAN = ArtifactPlan(kind="capture", identity={"for": "a test"})


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def make(store: LocalStore, **contents: str) -> Manifest:
    """Write what is missing of an artifact of two files."""
    with store.writer(PLAN) as writer:
        missing = [writer.folder / name for name in ("a", "b") if name not in writer.files]
        for path in missing:
            path.write_text(contents.get(path.name, f"content of {path.name}"))
        return writer.complete(missing)


def test_a_condemned_file_is_a_problem_and_the_next_writer_makes_it_anew(store: LocalStore) -> None:
    manifest = make(store)
    condemn(store, manifest, {"b": "of another\nlayer"})
    assert store.problems(manifest) == {"b": "b is to be made anew: of another layer"}
    assert not store.is_intact(PLAN.ref)
    with store.writer(PLAN) as writer:
        assert list(writer.files) == ["a"]
        assert not writer.is_complete
        assert not (writer.folder / "b").exists()


def test_what_was_made_anew_with_other_content_is_not_condemned(store: LocalStore) -> None:
    wrong = make(store)
    condemn(store, wrong, {"b": "wrong"})
    assert condemned(store, make(store, b="better")) == {}
    assert list(condemned(store, wrong)) == ["b"], "it may come back from the trash"


def test_the_same_content_made_anew_is_condemned_until_the_artifact_is_complete(store: LocalStore) -> None:
    manifest = make(store)
    condemn(store, manifest, {"b": "a disk that lies"})
    with store.writer(PLAN) as writer:
        (writer.folder / "b").write_text("content of b")
        writer.record(file_entry(writer.folder, writer.folder / "b"))
    assert list(condemned(store, manifest)) == ["b"]
    assert make(store).content == manifest.content
    assert condemned(store, manifest) == {}
    assert store.is_intact(PLAN.ref)


def test_the_first_reason_stays_and_files_that_the_manifest_does_not_name_are_ignored(
    store: LocalStore,
) -> None:
    manifest = make(store)
    condemn(store, manifest, {"b": "first", "c": "unknown"})
    condemn(store, manifest, {"a": "too", "b": "second"})
    assert condemned(store, manifest) == {
        "a": "a is to be made anew: too",
        "b": "b is to be made anew: first",
    }


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {"content": "x"}}'])
def test_a_note_that_cannot_be_read_is_one_line_with_the_way_out(store: LocalStore, text: str) -> None:
    manifest = make(store)
    store.notes("condemned").write(f"capture-{PLAN.ref.id}.json", text)
    with pytest.raises(StoreError, match=f"cannot be read; remove it and check .* verify {PLAN.ref}"):
        store.problems(manifest)
