"""A folder has one holder; a dead one is followed, and a frozen one that wakes up notices. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import FolderInUseError, StoreError
from eagle3_core.store.files import LOCK_NAME
from eagle3_core.store.local import LocalStore
from eagle3_core.store.locks import folder_lock
from tests.disks import small_disk

pytestmark = pytest.mark.both


PLAN = ArtifactPlan(kind="export", identity={"for": "a test"})
HOLD_LOCK = """
import sys, time
from pathlib import Path
from eagle3_core.store.locks import folder_lock
with folder_lock(Path(sys.argv[1]), run_id="20260101-abc"):
    print("held", flush=True)
    time.sleep(600)
"""
WRITE_AS_ANOTHER_HOST = f"""
import sys
from pathlib import Path
from eagle3_core.store import claims
claims.boot_id = lambda: "of another host"
claims.HEARTBEAT_SECONDS = 0.1
from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.errors import FolderInUseError
from eagle3_core.store.local import LocalStore
plan = ArtifactPlan.model_validate_json({PLAN.model_dump_json()!r})
with LocalStore(Path(sys.argv[1])).writer(plan, "of the frozen") as writer:
    (writer.folder / "frozen.txt").write_text("frozen")
    print("held", flush=True)
    sys.stdin.readline()
    try:
        writer.complete([writer.folder / "frozen.txt"])
    except FolderInUseError as error:
        print(error, flush=True)
"""


@contextlib.contextmanager
def process(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has said that it holds the folder."""
    command = [sys.executable, "-c", code, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=PROJECT_ROOT, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder
        finally:
            holder.kill()


def test_a_held_folder_is_refused_with_its_holder_and_free_at_once_after_kill_9(tmp_path: Path) -> None:
    with process(HOLD_LOCK, tmp_path) as holder:
        refusal = f"in use by another process .pid {holder.pid} on .*, run 20260101-abc"
        with pytest.raises(FolderInUseError, match=refusal):
            folder_lock(tmp_path, wait_seconds=0).__enter__()
        holder.kill()
        holder.wait()
        with folder_lock(tmp_path, wait_seconds=0) as lock:
            lock.check()
    assert list(tmp_path.iterdir()) == []


def test_a_frozen_writer_of_another_host_is_followed_and_notices_before_it_writes_the_manifest(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    with process(WRITE_AS_ANOTHER_HOST, tmp_path) as frozen:
        folder = store.folder(PLAN.ref)
        with pytest.raises(FolderInUseError):
            folder_lock(folder, wait_seconds=0, stale_seconds=300).__enter__()
        os.kill(frozen.pid, signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("eagle3_core.store.local.folder_lock", quickly)
            with store.writer(PLAN, "of the other", wait_seconds=120) as writer:
                (writer.folder / "other.txt").write_text("other")
                os.kill(frozen.pid, signal.SIGCONT)
                said, _ = frozen.communicate("go on\n", timeout=120)
                assert "was taken over by another process" in said
                assert "run of the other" in said
                assert store.find(PLAN.ref) is None
                writer.complete([writer.folder / "other.txt"])
    assert [entry.path for entry in store.read(PLAN.ref).files] == ["other.txt"]


def quickly(folder: Path, wait_seconds: float, run_id: str | None):  # type: ignore[no-untyped-def]
    """A folder lock that takes the folder of a silent holder of another host over after a second."""
    return folder_lock(folder, wait_seconds, run_id, stale_seconds=1.0)


def test_a_lock_file_that_an_older_version_left_holds_nobody_up_for_long(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text('{"pid": 1, "host": "old"}')
    os.utime(tmp_path / LOCK_NAME, (0, 0))
    with folder_lock(tmp_path, wait_seconds=0):
        pass


def test_what_waiting_processes_left_when_they_were_killed_is_removed_in_the_end(tmp_path: Path) -> None:
    for name, age in ((f"{LOCK_NAME}-clock-old", 0), (f"{LOCK_NAME}-clock-new", None)):
        (tmp_path / name).write_text("")
        if age is not None:
            os.utime(tmp_path / name, (age, age))
    with folder_lock(tmp_path, wait_seconds=0):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [f"{LOCK_NAME}-clock-new"]


def test_completing_an_artifact_leaves_the_files_of_those_that_wait_for_its_folder(tmp_path: Path) -> None:
    with LocalStore(tmp_path).writer(PLAN) as writer:
        waiting = writer.folder / f"{LOCK_NAME}-clock-1"
        waiting.write_text("")
        stranger = writer.folder / "stranger"
        stranger.write_text("")
        writer.complete()
        assert waiting.exists()
        assert not stranger.exists()


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "export").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match=r"cannot write into .*check the mount and its permissions"):
        LocalStore(tmp_path).writer(PLAN).__enter__()


def test_a_folder_that_cannot_be_written_is_said_to_be_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk.path / "artifact").mkdir()
        disk.make_read_only()
        with (
            pytest.raises(StoreError, match=r"cannot write into .*artifact \(Read-only file system\)"),
            folder_lock(disk.path / "artifact", wait_seconds=0.0),
        ):
            pass
