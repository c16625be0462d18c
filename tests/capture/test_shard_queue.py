"""Publication and the queue of missing shards; no engine and no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan, FileEntry
from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.journal import Journal
from eagle3_core.capture.shard_queue import ShardQueue, Staging
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.host.process_tree import boot_id
from eagle3_core.store.claims import Claims
from eagle3_core.store.files import write_atomic, write_new
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import PlannedShard, ShardLayout

LAYOUT = ShardLayout((2, 4, 5), 8, hidden_size=4, dtype="bfloat16", final_state="loss_rows")
SHARDS = tuple(PlannedShard(index, index * 2, index * 2 + 2, 100) for index in range(4))
CAPTURE = ArtifactPlan(kind="capture", identity={"for": "a test"}).ref


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(LocalStore(tmp_path), CAPTURE)


@pytest.fixture
def queue(staging: Staging):  # type: ignore[no-untyped-def]
    claims = Claims(staging.claims)
    yield ShardQueue(SHARDS, staging, claims)
    claims.close()


def finished(staging: Staging, shard: PlannedShard, name: str = "session") -> CaptureJob:
    """A session's job whose folder holds the finished shard."""
    folder = staging.open_session(name)
    job = CaptureJob(engine="e 1", dataset_folder="", folder=str(folder), layout=LAYOUT, shards=SHARDS)
    (folder / shard.file_name).write_bytes(b"states")
    entry = FileEntry(path=shard.file_name, bytes=6, xxh3_128="0" * 32)
    write_atomic(job.entry_path(shard), entry.model_dump_json())
    return job


def test_a_claim_that_was_thought_lost_can_be_taken_again(
    queue: ShardQueue, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = queue.take(0)
    assert shard == SHARDS[0]
    with monkeypatch.context() as away:
        away.setattr(Claims, "is_mine", lambda *_: False)
        assert not queue.publish(0, finished(staging, shard), {})
    assert queue.take(0) == SHARDS[0]


def test_a_shard_is_published_with_its_entry_and_not_given_again(staging: Staging, queue: ShardQueue) -> None:
    shard = queue.take(0)
    assert shard == SHARDS[0]
    assert queue.publish(0, finished(staging, shard), {"attempts": 1})
    assert (staging.capture_folder / shard.file_name).read_bytes() == b"states"
    entry = staging.entry(shard)
    assert entry is not None
    assert entry.facts == {"attempts": 1}
    assert [queue.take(0), queue.take(0), queue.take(0), queue.take(0)] == [*SHARDS[1:], None]
    assert queue.missing() == list(SHARDS[1:])
    assert not queue.has_work()


def test_a_session_whose_claim_was_taken_over_publishes_nothing(staging: Staging, queue: ShardQueue) -> None:
    shard = queue.take(0)
    assert shard is not None
    (staging.claims / f"{shard.file_name}.claim").unlink()
    other = Claims(staging.claims)
    assert other.take(shard.file_name)
    assert not queue.publish(0, finished(staging, shard), {})
    assert not (staging.capture_folder / shard.file_name).exists()
    other.close()


def test_a_file_that_a_dead_publisher_left_without_its_entry_is_replaced(
    staging: Staging, queue: ShardQueue
) -> None:
    shard = queue.take(0)
    assert shard is not None
    staging.capture_folder.mkdir(parents=True)
    (staging.capture_folder / shard.file_name).write_bytes(b"of a dead one")
    assert queue.publish(0, finished(staging, shard), {})
    assert (staging.capture_folder / shard.file_name).read_bytes() == b"states"


def test_a_host_that_wakes_up_after_another_published_replaces_neither_shard_nor_entry(
    staging: Staging,
) -> None:
    shard = SHARDS[0]
    frozen, other = finished(staging, shard, "frozen"), finished(staging, shard, "other")
    entries = [job.finished_entry(shard) for job in (frozen, other)]
    assert entries[0] is not None
    assert entries[1] is not None
    theirs = entries[1].model_copy(update={"facts": {"by": "other"}})
    assert staging.publish(shard, theirs, Path(other.folder))
    (Path(frozen.folder) / shard.file_name).write_bytes(b"other bytes")
    assert not staging.publish(shard, entries[0], Path(frozen.folder), lambda: True)
    assert (staging.capture_folder / shard.file_name).read_bytes() == b"states"
    assert staging.entry(shard) == theirs


def test_a_host_that_wakes_up_between_file_and_entry_keeps_file_and_entry_together(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has linked its file, stands still, and writes its entry just before the one that took over."""
    shard = SHARDS[0]
    first, second = finished(staging, shard, "first"), finished(staging, shard, "second")
    (Path(first.folder) / shard.file_name).write_bytes(b"first!")
    mine, theirs = first.finished_entry(shard), second.finished_entry(shard)
    assert mine is not None
    assert theirs is not None
    mine = mine.model_copy(update={"facts": {"by": "first"}})
    staging.capture_folder.mkdir(parents=True)
    os.link(Path(first.folder) / shard.file_name, staging.capture_folder / shard.file_name)

    def wake_up(path: Path, content: str) -> bool:
        assert write_new(path, mine.model_dump_json())
        return write_new(path, content)

    monkeypatch.setattr("eagle3_core.capture.shard_queue.write_new", wake_up)
    assert not staging.publish(shard, theirs, Path(second.folder))
    assert staging.entry(shard) == mine
    assert (staging.capture_folder / shard.file_name).read_bytes() == b"first!"


def test_a_shard_made_by_another_host_meanwhile_is_not_given(staging: Staging, queue: ShardQueue) -> None:
    job = finished(staging, SHARDS[0])
    entry = job.finished_entry(SHARDS[0])
    assert entry is not None
    staging.publish(SHARDS[0], entry, Path(job.folder))
    assert queue.take(0) == SHARDS[1]
    assert queue.missing() == list(SHARDS[1:])


def test_a_shard_whose_engine_died_is_given_to_later_sessions_only(
    queue: ShardQueue,
) -> None:
    assert [queue.take(0), queue.take(0)] == list(SHARDS[:2])
    queue.give_back([0, 1], ["x", "y"], {"x": 0, "y": 1})
    assert queue.suspects() == ("x", "y")
    assert queue.take(0) == SHARDS[2]
    assert queue.take(queue.deaths) == SHARDS[0]
    assert (queue.attempts(0), queue.attempts(2)) == (2, 1)
    queue.acquit("x", 0)
    queue.done(1)
    assert queue.suspects() == ()


def test_quarantined_samples_are_remembered_with_their_reason(staging: Staging) -> None:
    assert staging.quarantined() == {}
    staging.quarantine("a/b", "killed it")
    assert Staging(LocalStore(staging.path.parent.parent), CAPTURE).quarantined() == {"a/b": "killed it"}


def test_the_folders_of_dead_sessions_go_and_those_of_living_ones_stay(staging: Staging) -> None:
    mine, dead, foreign = (staging.open_session(name) for name in ("mine", "dead", "foreign"))
    process = subprocess.run(
        [sys.executable, "-c",
         "from eagle3_core.host.process_tree import ProcessId; print(ProcessId.current())"],
        cwd=PROJECT_ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    gone = process.stdout.strip()
    (dead / "owner").write_text(f"{gone}\n{boot_id()}")
    (foreign / "owner").write_text(f"1:2:elsewhere pid:[3]\n{boot_id()}")
    (staging.open_session("namesake") / "owner").write_text(f"{gone}\nof a host of the same name")
    assert staging.remove_dead_sessions() == ["dead"]
    assert mine.is_dir()
    assert foreign.is_dir()


def test_the_journal_of_a_killed_process_names_what_was_in_flight(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j" / "in_flight.log")
    assert journal.in_flight() == []
    for key in ("a", "b", "c \u2028 d\n+e"):
        journal.started(key)
    assert not journal.has_finished_any()
    journal.finished("b")
    assert journal.has_finished_any()
    assert Journal(tmp_path / "j" / "in_flight.log").in_flight() == ["a", "c \u2028 d\n+e"]


def test_a_worker_that_cannot_leave_its_reason_prints_it_and_ends(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("a file where the session's folder should be")
    job = CaptureJob(
        engine="e 1", dataset_folder="", folder=str(tmp_path / "full"), layout=LAYOUT, shards=SHARDS
    )
    code = (
        "import sys, time; from eagle3_core.capture.job import CaptureJob; "
        "CaptureJob.model_validate_json(sys.argv[1]).record_failure(OSError(28, 'no space left')); "
        "time.sleep(60)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, job.model_dump_json()],
        cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout.startswith("capture failed: OSError: [Errno 28] no space left (and cannot write")
