"""What is sent when: suspects alone and first, shards as late as the engine allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.feed import PENDING_BATCHES, SampleFeed
from eagle3_core.capture.job import ASK_AGAIN_SECONDS, LATER, CaptureJob, Later
from eagle3_core.store.files import write_atomic
from eagle3_core.store.shards import PlannedShard, ShardLayout
from tests.capture.runs import make_samples

LAYOUT = ShardLayout((2, 4, 5), 8, hidden_size=4, dtype="float32", final_state="loss_rows")
SAMPLES = make_samples([10] * 10)
SHARDS = tuple(PlannedShard(index, index * 2, index * 2 + 2, 1) for index in range(5))


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def make_feed(
    folder: Path,
    step_tokens: int = 1000,
    most_requests: int | None = None,
    alone: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> tuple[SampleFeed[str], CaptureJob]:
    job = CaptureJob(
        engine="e 1", dataset_folder="", folder=str(folder), layout=LAYOUT, shards=SHARDS,
        alone=tuple(alone), left_out=tuple(left_out),
    )  # fmt: skip
    return SampleFeed(job, SAMPLES, None, step_tokens, most_requests), job


def send(feed: SampleFeed[str]) -> list[int]:
    """Send what may be sent; the numbers of the samples."""
    numbers = []
    for sample in feed.to_send():
        feed.sent(sample.key, sample)
        numbers.append(int(sample.key[-3:]))
    return numbers


def write(job: CaptureJob, index: int) -> None:
    entry = FileEntry(path=SHARDS[index].file_name, bytes=1, xxh3_128="0" * 32)
    write_atomic(job.entry_path(SHARDS[index]), entry.model_dump_json())


def test_at_most_three_shards_are_unfinished_and_a_written_one_makes_room(
    tmp_path: Path,
) -> None:
    feed, job = make_feed(tmp_path)
    feed.refill()
    assert send(feed) == [0, 1, 2, 3, 4, 5]
    feed.refill()
    assert send(feed) == []
    write(job, 1)
    assert [shard.index for shard, _ in feed.finished()] == [1]
    assert feed.finished() == []
    feed.refill()
    assert send(feed) == [6, 7]
    assert [shard.index for shard in feed.unfinished] == [0, 2, 3]


def test_a_shard_is_taken_only_when_the_engine_is_about_to_run_dry(tmp_path: Path) -> None:
    feed, _ = make_feed(tmp_path, step_tokens=20 // PENDING_BATCHES)
    feed.refill()
    assert send(feed) == [0, 1]
    feed.refill()
    assert send(feed) == []
    feed.answered("sample-000")
    feed.refill()
    assert send(feed) == [2, 3]


def test_no_more_requests_are_in_flight_than_allowed(tmp_path: Path) -> None:
    feed, _ = make_feed(tmp_path, most_requests=2)
    feed.refill()
    assert send(feed) == [0, 1]
    assert feed.answered("sample-001").key == "sample-001"
    assert send(feed) == [2]


def test_suspects_of_a_shard_go_first_with_nothing_else_in_flight(tmp_path: Path) -> None:
    feed, _ = make_feed(tmp_path, alone=["sample-001", "sample-003"])
    feed.refill()
    assert send(feed) == [1]
    assert send(feed) == []
    feed.answered("sample-001")
    assert send(feed) == [0]
    feed.answered("sample-000")
    assert send(feed) == [3]
    feed.answered("sample-003")
    assert send(feed) == [2, 4, 5]


def test_quarantined_samples_are_not_sent_and_the_end_is_known(tmp_path: Path) -> None:
    feed, job = make_feed(tmp_path, left_out=["sample-000", "sample-009"])
    sent = []
    while not feed.is_done:
        feed.refill()
        sent += send(feed)
        for ticket in list(feed.in_flight):
            feed.answered(ticket)
        for shard in list(feed.unfinished):
            write(job, shard.index)
        feed.finished()
    assert sent == list(range(1, 9))


def test_while_no_shard_may_be_begun_what_is_in_flight_is_finished_and_it_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("eagle3_core.capture.feed.time", clock)
    answers = [SHARDS[0], LATER, LATER, SHARDS[1], None]
    asked = []

    def take() -> PlannedShard | Later | None:
        asked.append(clock.monotonic())
        return answers.pop(0)

    _, job = make_feed(tmp_path)
    feed: SampleFeed[str] = SampleFeed(job, SAMPLES, take, 1000)
    feed.refill()
    assert send(feed) == [0, 1]
    for _ in range(3):  # it goes on with what it has, and does not ask at every step
        feed.refill()
    assert len(asked) == 2
    for ticket in list(feed.in_flight):
        feed.answered(ticket)
    write(job, 0)
    feed.finished()
    assert not feed.is_done
    while not feed.unfinished:  # nothing to do: it sleeps until it may ask again
        feed.refill()
    assert send(feed) == [2, 3]
    assert len(asked) == 5
    assert asked[2] - asked[1] >= ASK_AGAIN_SECONDS
