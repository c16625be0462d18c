"""Looking below a folder that others change."""

from __future__ import annotations

import shutil
from pathlib import Path

from eagle3_core.store.tree import files_below, folder_bytes


def make_tree(folder: Path) -> None:
    for name in ("z", "a/x", "b/c/y"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")


def test_files_at_any_depth_are_found_and_counted(tmp_path: Path) -> None:
    make_tree(tmp_path)
    assert sorted(files_below(tmp_path)) == [tmp_path / name for name in ("a/x", "b/c/y", "z")]
    assert folder_bytes(tmp_path) == 15


def test_a_folder_that_is_removed_meanwhile_has_no_files_any_more(tmp_path: Path) -> None:
    make_tree(tmp_path)
    found = files_below(tmp_path)
    assert next(found) == tmp_path / "z"
    shutil.rmtree(tmp_path / "b")
    assert list(found) == [tmp_path / "a" / "x"]


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert not list(files_below(tmp_path / "gone"))
    assert folder_bytes(tmp_path / "gone") == 0
