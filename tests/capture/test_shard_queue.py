"""Claims, publication and the queue of missing shards; no engine and no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan, FileEntry
from eagle3_core.capture.claims import ShardClaims
from eagle3_core.capture.job import CaptureJob, Journal
from eagle3_core.capture.shard_queue import ShardQueue, Staging
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.host.process_tree import ProcessId, boot_id
from eagle3_core.store.files import write_atomic
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
    claims = ShardClaims(staging.claims)
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


def test_of_two_processes_one_gets_a_shard_and_the_other_the_next(staging: Staging) -> None:
    first, second = ShardClaims(staging.claims), ShardClaims(staging.claims)
    assert first.take("a")
    assert not second.take("a")
    assert second.is_held_elsewhere("a")
    assert not first.is_held_elsewhere("a")
    assert second.take("b")
    first.release("a")
    assert second.take("a")
    second.release("a")
    second.close()
    first.close()
    assert not list(staging.claims.iterdir())


def test_the_claim_of_a_process_of_this_host_that_is_gone_is_taken_over(staging: Staging) -> None:
    code = (
        "import os, sys; from pathlib import Path; from eagle3_core.capture.claims import ShardClaims; "
        "assert ShardClaims(Path(sys.argv[1])).take('a'); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(staging.claims)], cwd=PROJECT_ROOT)
    assert done.returncode == 9
    claims = ShardClaims(staging.claims)
    assert not claims.is_held_elsewhere("a")
    assert claims.take("a")
    claims.close()


def foreign_claim(staging: Staging, age_seconds: float) -> None:
    """A claim of a process on another host, touched so long ago by the file system's clock."""
    staging.claims.mkdir(parents=True, exist_ok=True)
    path = staging.claims / "a.claim"
    path.write_text(json.dumps({"process": "1:2:elsewhere pid:[3]", "token": "t"}))
    now = path.stat().st_mtime
    os.utime(path, (now - age_seconds, now - age_seconds))


def test_the_claim_of_another_host_counts_as_long_as_it_is_touched(staging: Staging) -> None:
    foreign_claim(staging, age_seconds=60)
    claims = ShardClaims(staging.claims, stale_seconds=90)
    assert claims.is_held_elsewhere("a")
    assert not claims.take("a")
    foreign_claim(staging, age_seconds=100)
    assert claims.take("a")
    assert claims.is_mine("a")
    claims.close()


def test_a_host_of_the_same_name_is_another_host(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    here, namesake = ProcessId.current(), ShardClaims(staging.claims)
    with monkeypatch.context() as there:
        there.setattr("eagle3_core.capture.claims.boot_id", lambda: "of the other host")
        there.setattr(ProcessId, "current", lambda: here.model_copy(update={"start_ticks": 1}))
        first = ShardClaims(staging.claims)
        assert first.take("a")
    assert namesake.is_held_elsewhere("a")
    assert not namesake.take("a")
    first.close()
    namesake.close()


def test_a_claim_that_a_crash_left_empty_is_taken_over_when_it_is_old(staging: Staging) -> None:
    staging.claims.mkdir(parents=True)
    path = staging.claims / "a.claim"
    path.write_text("")
    claims = ShardClaims(staging.claims, stale_seconds=90)
    assert claims.is_held_elsewhere("a")
    os.utime(path, (0, 0))
    assert not claims.is_held_elsewhere("a")
    assert claims.take("a")
    claims.close()


def test_a_dead_claim_that_another_host_takes_over_first_stays_with_that_host(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign_claim(staging, age_seconds=100)
    first, second = (ShardClaims(staging.claims, stale_seconds=90) for _ in range(2))
    judge = second._is_free

    def judge_slowly(*arguments):  # type: ignore[no-untyped-def]
        found = judge(*arguments)
        assert first.take("a")
        return found

    monkeypatch.setattr(second, "_is_free", judge_slowly)
    assert not second.take("a")
    assert first.is_mine("a")
    first.close()
    second.close()


def test_a_claim_that_was_thought_lost_can_be_taken_again(
    queue: ShardQueue, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = queue.take(0)
    assert shard == SHARDS[0]
    with monkeypatch.context() as away:
        away.setattr(ShardClaims, "is_mine", lambda *_: False)
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
    other = ShardClaims(staging.claims)
    assert other.take(shard.file_name)
    assert not queue.publish(0, finished(staging, shard), {})
    assert not (staging.capture_folder / shard.file_name).exists()
    other.close()


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
        cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout.startswith("capture failed: OSError: [Errno 28] no space left (and cannot write")
