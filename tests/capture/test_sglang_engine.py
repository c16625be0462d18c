"""What the driver sends and refuses, with a stand-in for the engine: neither SGLang nor torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture import sglang_engine
from eagle3_core.capture.job import CaptureJob, EngineEndedError
from eagle3_core.capture.sglang_batch import sample_index
from eagle3_core.capture.sglang_engine import REQUESTS_PER_SLOT, SglangDriver
from eagle3_core.capture.sglang_plan import READY_NAME
from eagle3_core.capture.sglang_transport import Transport
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import ShardLayout, plan_shards
from tests.capture.runs import make_samples

SLOTS = 2
CONFIG = RunConfig.model_validate(
    {"name": "a", "target": {"model": "m"}, "engine": {"max_num_seqs": SLOTS},
     "capture": {"engine": "sglang", "max_batched_tokens": 64}}
)  # fmt: skip


class StandIn(Transport):
    """Answers when the driver has sent all that it may, and leaves the entries that the writer would."""

    def __init__(self, job: CaptureJob, samples: Sequence[Sample], **changes: Any) -> None:
        self.job, self.samples, self.changes = job, samples, changes
        self.sent: list[str] = []
        self.in_flight: list[list[str]] = []
        self.is_dead = False
        self._open: dict[str, Future[dict[str, Any]]] = {}

    def send(self, rid: str, token_ids: Sequence[int]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        index = sample_index(rid)
        if index is None:
            if not self.is_dead:
                future.set_result({})
            return future
        key = self.samples[index].key
        self.sent.append(key)
        self.in_flight.append(self.job.journal.in_flight())
        meta = {"prompt_tokens": len(token_ids), "cached_tokens": 0, "finish_reason": {"type": "length"}}
        future.set_result(meta | self.changes)
        self._write(key)
        return future

    def _write(self, key: str) -> None:
        for shard in self.job.shards:
            keys = [sample.key for sample in self.job.samples_of(shard, self.samples)]
            if key in keys and set(keys) <= set(self.sent):
                entry = FileEntry(path=shard.file_name, bytes=1, xxh3_128="0" * 32)
                self.job.entry_path(shard).write_text(entry.model_dump_json())

    async def _generate(self, rid: str, token_ids: list[int]) -> dict[str, Any]:
        raise AssertionError(rid)

    def settings(self) -> dict[str, Any]:
        return {}

    def check_alive(self) -> None:
        if self.is_dead:
            raise EngineEndedError("a process of the SGLang engine ended")


def make(
    folder: Path, job_changes: dict[str, Any] | None = None, **changes: Any
) -> tuple[SglangDriver, StandIn]:
    samples = make_samples([20] * 12)
    layout = ShardLayout((2, 4, 5), 8, 16, "float32", "all")
    job = CaptureJob(
        engine="sglang-under-test", dataset_folder=str(folder), folder=str(folder), layout=layout,
        shards=tuple(plan_shards(samples, layout, 16 << 10)), **job_changes or {},
    )  # fmt: skip
    engine = StandIn(job, samples, **changes)
    return SglangDriver(CONFIG, engine, job, samples, lambda count: None), engine


def test_every_sample_is_sent_once_and_journalled_while_it_is_computed(tmp_path: Path) -> None:
    driver, engine = make(tmp_path)
    assert [shard.index for shard, _ in driver.run()] == [shard.index for shard in engine.job.shards]
    assert engine.sent == [sample.key for sample in engine.samples]
    assert engine.job.journal.in_flight() == []
    assert max(map(len, engine.in_flight)) == REQUESTS_PER_SLOT * SLOTS
    assert all(key in flying for key, flying in zip(engine.sent, engine.in_flight, strict=True))


def test_suspects_are_sent_first_with_nothing_else_in_flight_and_quarantined_ones_not_at_all(
    tmp_path: Path,
) -> None:
    changes = {"alone": ("sample-001", "sample-002"), "left_out": ("sample-004",)}
    driver, engine = make(tmp_path, changes)
    list(driver.run())
    assert engine.sent[:3] == ["sample-001", "sample-002", "sample-000"]
    assert engine.in_flight[:3] == [["sample-001"], ["sample-002"], ["sample-000"]]
    assert "sample-004" not in engine.sent
    assert len(engine.sent) == 11


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cached_tokens": 3}, r"sample sample-\d+: .* ran 20 tokens, 3 of them from its cache"),
        ({"prompt_tokens": 19}, "ran 19 tokens"),
        ({"finish_reason": {"type": "abort"}}, "ended by abort"),
    ],
)
def test_a_reply_about_other_tokens_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    driver, _ = make(tmp_path, **change)
    with pytest.raises(CaptureError, match=message):
        list(driver.run())


def test_hooks_that_were_never_attached_are_found_before_the_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_engine, "CHECK_SECONDS", 0.1)
    driver, engine = make(tmp_path)
    with pytest.raises(CaptureError, match=r"no hook of the capture saw a batch.*logits_processor"):
        driver.check_hooks(1)
    (tmp_path / READY_NAME).write_text("{}")
    driver.check_hooks(1)
    assert not engine.sent


def test_what_a_hook_recorded_is_raised_instead_of_a_time_out(tmp_path: Path) -> None:
    driver, engine = make(tmp_path)
    engine.job.record_failure(CaptureError("two modules of the target match"))
    with pytest.raises(CaptureError, match="two modules of the target match"):
        driver.check_hooks(1)


def test_an_engine_that_cannot_compute_the_target_is_unfit_and_not_a_death(tmp_path: Path) -> None:
    driver, engine = make(tmp_path)
    engine.is_dead = True
    with pytest.raises(CaptureError, match="ended in its first forward pass") as caught:
        driver.check_hooks(1)
    assert not isinstance(caught.value, EngineEndedError)
