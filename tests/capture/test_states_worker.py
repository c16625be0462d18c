"""The connector's two halves without an engine: what is noted of requests, what is copied out of a cache."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.journal import Journal
from eagle3_core.capture.request_log import FinishedRequest, RequestLog
from eagle3_core.capture.states_worker import StatesWorker
from eagle3_core.errors import CaptureError
from eagle3_core.store.dataset import DATASET_FILE, write_dataset
from eagle3_core.store.shards import ShardLayout, ShardReader, plan_shards
from tests.capture.runs import make_samples

pytestmark = pytest.mark.engine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES = make_samples([9, 5, 12])
LAYOUT = ShardLayout((2, 4, 5), 8, hidden_size=4, dtype="float32", final_state="loss_rows")
BLOCK = 4


def request(name: str, **fields: Any) -> Any:
    given = {"kv_transfer_params": {"eagle3_sample": name}, "prompt_token_ids": [5, 6, 7]}
    return SimpleNamespace(**{"request_id": f"r-{name}", "num_computed_tokens": 3, **given, **fields})


def new_request(name: str, cached: int, **parameters: Any) -> Any:
    params = SimpleNamespace(extra_args={"kv_transfer_params": parameters or {"eagle3_sample": name}})
    return SimpleNamespace(req_id=f"r-{name}", num_computed_tokens=cached, sampling_params=params)


@pytest.fixture
def log(tmp_path: Path) -> RequestLog:
    return RequestLog(Journal(tmp_path / "in_flight.log"))


def test_a_finished_request_keeps_its_blocks_and_is_handed_over_once(log: RequestLog) -> None:
    assert log.started([new_request("a", 0)]) is None
    assert log.finished(request("a"), [1, 2])
    assert log.take() == [FinishedRequest("r-a", "a", [5, 6, 7], 3, [1, 2])]
    assert log.take() == []


def test_tokens_from_a_prefix_cache_have_no_row(log: RequestLog) -> None:
    log.started([new_request("a", 2)])
    log.finished(request("a"), [1])
    assert log.take()[0].num_rows == 1


def test_aborted_and_foreign_requests_leave_nothing(log: RequestLog) -> None:
    assert not log.finished(request("never scheduled", num_computed_tokens=0), [])
    assert not log.finished(request("half computed", num_computed_tokens=2), [1])
    assert not log.finished(request("foreign", kv_transfer_params=None), [1])
    assert log.take() == []


def test_a_flush_request_is_seen_when_it_starts(log: RequestLog) -> None:
    assert log.started([new_request("a", 0), new_request("d", 0, eagle3_flush=[3, 4])]) == [3, 4]
    assert None is log.started([SimpleNamespace(req_id="w", num_computed_tokens=0, sampling_params=None)])


@pytest.fixture
def job(tmp_path: Path) -> CaptureJob:
    (tmp_path / "dataset").mkdir()
    write_dataset(tmp_path / "dataset" / DATASET_FILE, SAMPLES)
    shards = tuple(plan_shards(SAMPLES, LAYOUT, 1 << 20))
    return CaptureJob(
        engine="e-1",
        dataset_folder=str(tmp_path / "dataset"),
        folder=str(tmp_path),
        layout=LAYOUT,
        shards=shards,
    )


def cache() -> torch.Tensor:
    """[16 blocks, 4 tokens, 4 layers, 4 wide] of distinct values."""
    return torch.arange(16 * BLOCK * 4 * 4, dtype=torch.float32, device=DEVICE).view(16, BLOCK, 4, 4)


def finished(index: int, blocks: list[int], **fields: Any) -> FinishedRequest:
    sample = SAMPLES[index]
    ids = sample.input_ids.tolist()
    values = {"token_ids": ids, "num_rows": len(ids), **fields}
    return FinishedRequest(f"r-{index}", sample.key, block_ids=blocks, **values)


REQUESTS = [finished(2, [7, 3, 9]), finished(0, [1, 15, 4]), finished(1, [0, 2])]


def test_rows_are_copied_out_of_scattered_blocks(job: CaptureJob) -> None:
    worker, held = StatesWorker(job, cache()), cache().cpu()
    worker.begin_step()
    done = worker.step(REQUESTS[:1]) | worker.step(REQUESTS[1:], flush=[0])
    assert done == {"r-0", "r-1", "r-2"}
    worker.close()
    assert job.finished_entry(job.shards[0]) is not None
    stored = list(ShardReader(Path(job.folder) / job.shards[0].file_name))
    for which in REQUESTS:
        sample = next(s for s in stored if s.key == which.sample)
        rows = held[which.block_ids].flatten(0, 1)[: len(sample.input_ids)]
        assert torch.equal(sample.aux_states, rows[:, :3])
        assert torch.equal(sample.final_states, rows[sample.final_rows, 3])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (finished(0, [1, 2, 3], num_rows=5), "5 rows of states for 9 tokens; expected 9 rows"),
        (finished(0, [1, 2]), "8 rows of states for 9 tokens; expected 9 rows"),
        (finished(0, [1, 2, 3], token_ids=[3] * 9), "ran token 3 at position 0"),
        (finished(0, [1, 2, 3], token_ids=[3] * 8), "for 8 tokens; expected 9 rows"),
    ],
)
def test_a_mismatch_is_recorded_for_the_driver_and_the_engine_goes_on(
    job: CaptureJob, bad: FinishedRequest, message: str
) -> None:
    worker = StatesWorker(job, cache())
    worker.begin_step()
    assert worker.step([bad]) == {"r-0"}
    assert worker.step([REQUESTS[2]], flush=[0]) == {"r-1"}
    with pytest.raises(CaptureError, match=message):
        job.raise_failure()
    worker.close()


@pytest.mark.parametrize(
    ("given", "message"), [(REQUESTS[:1], "no states for 2 samples"), ([], "any sample of shard 0")]
)
def test_a_flush_with_samples_missing_is_recorded(
    job: CaptureJob, given: list[FinishedRequest], message: str
) -> None:
    worker = StatesWorker(job, cache())
    worker.begin_step()
    worker.step(given, flush=[0])
    with pytest.raises(CaptureError, match=message):
        job.raise_failure()
    worker.close()


def test_states_of_another_dtype_are_refused(job: CaptureJob) -> None:
    with pytest.raises(CaptureError, match=r"bfloat16; expected float32"):
        StatesWorker(job, cache().bfloat16())
