"""The cache of samples: bounded whoever writes, oldest first, and nothing lost by a killed writer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.store.sample_cache import BLOCK_BYTES, SampleCache

WRITER = """
import sys
from pathlib import Path
from eagle3_core.store.sample_cache import SampleCache
folder, limit, writer = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
cache = SampleCache(folder, limit)
for number in range(150):
    name, size = f"{writer}-{number}", 1000 + 137 * (number % 60)
    cache.put(name, name.encode() * (size // len(name)))
    found = cache.get(name, size // len(name) * len(name))
    assert found is None or found == name.encode() * (size // len(name)), name
"""
DYING = """
import os, signal, sys
from pathlib import Path
from eagle3_core.store.sample_cache import SampleCache
with SampleCache(Path(sys.argv[1]), int(sys.argv[2]))._room("lost", 3 * 4096) as file:
    file.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def put(cache: SampleCache, name: str, num_blocks: int, used_at: float | None = None) -> bool:
    kept = cache.put(name, bytes(num_blocks * BLOCK_BYTES))
    if used_at is not None:
        os.utime(cache.folder / name, (used_at, used_at))
    return kept


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_an_entry_comes_back_as_it_was_put(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path / "cache", 1 << 20)
    assert cache.get("one", 5) is None
    assert cache.put("one", b"hello")
    assert cache.get("one", 5) == b"hello"
    assert cache.get("two", 5) is None
    assert cache.bytes_taken() == BLOCK_BYTES


def test_the_entry_that_was_read_longest_ago_makes_room(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path, 4 * BLOCK_BYTES)
    for age, name in ((30, "a"), (20, "b"), (10, "c")):
        assert put(cache, name, 1, time.time() - age)
    assert cache.get("a", BLOCK_BYTES) is not None
    assert put(cache, "d", 2)
    assert names(tmp_path) == {"a", "c", "d"}


def test_what_the_running_epochs_have_read_stays_and_nothing_displaces_it(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path, 4 * BLOCK_BYTES)
    now = time.time()
    for age, name in ((100, "stale"), (5, "a"), (4, "b"), (3, "c")):
        assert put(cache, name, 1, now - age)
    cache.keep_from = now - 50
    assert put(cache, "d", 1)
    assert names(tmp_path) == {"a", "b", "c", "d"}
    assert not put(cache, "e", 1)
    assert names(tmp_path) == {"a", "b", "c", "d"}


def test_a_larger_entry_than_the_limit_is_not_kept_and_no_limit_keeps_nothing(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path / "small", 2 * BLOCK_BYTES)
    assert put(cache, "a", 1)
    assert not put(cache, "b", 3)
    nothing = SampleCache(tmp_path / "none", 0)
    assert not nothing.put("a", b"x")
    assert nothing.get("a", 1) is None
    assert not (tmp_path / "none").exists()


def test_a_cut_entry_is_a_miss_and_goes(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path, 1 << 20)
    cache.put("cut", b"12345678")
    os.truncate(tmp_path / "cut", 5)
    assert cache.get("cut", 8) is None
    assert names(tmp_path) == set()


def test_what_a_killed_writer_had_taken_is_free_again(tmp_path: Path) -> None:
    limit = 4 * BLOCK_BYTES
    status = run(DYING, str(tmp_path), str(limit)).wait()
    assert status == -signal.SIGKILL
    assert SampleCache(tmp_path, limit).bytes_taken() == 3 * BLOCK_BYTES
    cache = SampleCache(tmp_path, limit)
    assert put(cache, "a", 4)
    assert cache.bytes_taken() == limit


def test_a_ledger_that_cannot_be_read_is_counted_anew(tmp_path: Path) -> None:
    cache = SampleCache(tmp_path, 2 * BLOCK_BYTES)
    assert put(cache, "a", 1)
    (tmp_path / ".lock").write_bytes(b"\0garbage")
    assert put(cache, "b", 1)
    assert put(cache, "c", 1)
    assert cache.bytes_taken() <= 2 * BLOCK_BYTES


def test_several_processes_together_never_exceed_the_limit(tmp_path: Path) -> None:
    limit, most = 20 * BLOCK_BYTES, 0
    cache = SampleCache(tmp_path, limit)
    writers = [run(WRITER, str(tmp_path), str(limit), str(number)) for number in range(3)]
    while any(writer.poll() is None for writer in writers):
        most = max(most, cache.bytes_taken())
        time.sleep(0.002)
    most = max(most, cache.bytes_taken())
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert 0 < most <= limit
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_folder_that_cannot_be_written_only_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not SampleCache(tmp_path / "file" / "cache", 1 << 20).put("a", b"x")


def run(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=PROJECT_ROOT)
