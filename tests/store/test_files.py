"""Files appear whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from eagle3_core.artifacts import FileEntry
from eagle3_core.errors import StoreError
from eagle3_core.store.files import (
    HashingWriter,
    atomic_file,
    file_entry,
    file_problem,
    hash_file,
    remove_temporary_files,
    write_atomic,
    write_new,
)

pytestmark = pytest.mark.both


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.txt", "old")

    def fail_in_the_middle() -> None:
        with atomic_file(tmp_path / "a.txt") as handle:
            handle.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_in_the_middle()
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_hash_while_writing_equals_the_hash_of_the_file(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "a.bin") as handle:
        writer = HashingWriter(handle, with_sha256=True)
        writer.write(b"abc")
        writer.write(memoryview(bytes(10_000)))
        writer.wait()
        writer.close()
    assert writer.hexdigest() == hash_file(tmp_path / "a.bin")
    assert writer.sha256() == hashlib.sha256((tmp_path / "a.bin").read_bytes()).hexdigest()
    assert writer.bytes == (tmp_path / "a.bin").stat().st_size == 10_003


DAMAGES = {
    "last byte cut": (lambda data: data[:-1], "bytes"),
    "cut to four bytes": (lambda data: data[:4], "bytes"),
    "empty": (lambda data: b"", "bytes"),
    "one trailing byte": (lambda data: data + b"\0", "bytes"),
    "one bit flipped": (lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], "hash"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_kind_of_damage_is_seen(tmp_path: Path, name: str) -> None:
    change, reason = DAMAGES[name]
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(100)))
    entry = file_entry(tmp_path, path)
    assert file_problem(tmp_path, entry) is None
    path.write_bytes(change(path.read_bytes()))
    assert reason in (file_problem(tmp_path, entry) or "")


def test_a_missing_file_is_seen(tmp_path: Path) -> None:
    entry = FileEntry(path="gone", bytes=1, xxh3_128="0")
    assert "missing" in (file_problem(tmp_path, entry) or "")


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / ".tmp-a.bin.123").write_bytes(b"half")
    (tmp_path / "keep.bin").write_bytes(b"whole")
    remove_temporary_files(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["keep.bin"]


def test_of_several_that_write_a_new_file_one_succeeds(tmp_path: Path) -> None:
    assert write_new(tmp_path / "a.txt", "first")
    assert not write_new(tmp_path / "a.txt", "second")
    assert (tmp_path / "a.txt").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_what_refuses_just_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.txt", "old")

    def refuse() -> None:
        assert (tmp_path / "a.txt").read_text() == "old"
        raise StoreError("taken over")

    with pytest.raises(StoreError, match="taken over"):
        write_atomic(tmp_path / "a.txt", "new", before_rename=refuse)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_temporary_file_that_another_process_removed_is_an_error_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="another process has taken"), atomic_file(tmp_path / "a.txt"):
        remove_temporary_files(tmp_path)
