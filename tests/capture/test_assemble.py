"""Rows and ids are compared before states are accepted; a shard is written when its last sample is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_core.capture.assemble import ShardAssembler
from eagle3_core.capture.job import CaptureJob
from eagle3_core.errors import CaptureError
from eagle3_core.store.files import file_problem
from eagle3_core.store.shards import ShardLayout, ShardReader, plan_shards
from tests.capture.runs import make_samples

pytestmark = pytest.mark.engine

LAYOUT = ShardLayout((2, 4, 5), 8, hidden_size=4, dtype="float32", final_state="loss_rows")
SAMPLES = make_samples([70, 100, 6, 8, 5, 9])


def make_job(folder: Path, samples_per_shard: int = 2) -> CaptureJob:
    one_by_one = plan_shards(SAMPLES, LAYOUT, 1)
    starts = range(0, len(SAMPLES), samples_per_shard)
    shards = tuple(
        replace(one_by_one[0], index=number, start=start, end=start + samples_per_shard)
        for number, start in enumerate(starts)
    )
    return CaptureJob(engine="stub-1", dataset_folder="", folder=str(folder), layout=LAYOUT, shards=shards)


def states_of(index: int) -> torch.Tensor:
    return torch.randn(len(SAMPLES[index]), 4, 4, generator=torch.Generator().manual_seed(index))


def add(assembler: ShardAssembler, index: int, rows: slice = slice(None)) -> None:
    sample = SAMPLES[index]
    assembler.add(sample.key, sample.input_ids.tolist(), states_of(index)[rows])


def test_samples_in_any_order_end_up_in_their_own_place(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assembler = ShardAssembler(job, SAMPLES)
    for index in (3, 0, 1, 5, 2, 4):
        add(assembler, index)
    assembler.drain()
    assembler.close()
    for shard in job.shards:
        entry = job.finished_entry(shard)
        assert entry is not None
        assert file_problem(tmp_path, entry) is None
        for place, read in enumerate(ShardReader(tmp_path / shard.file_name)):
            index = shard.start + place
            assert read.key == SAMPLES[index].key
            assert torch.equal(read.aux_states, states_of(index)[:, :3])
            assert torch.equal(read.final_states, states_of(index)[read.final_rows, 3])
            assert np.array_equal(read.input_ids.numpy(), SAMPLES[index].input_ids)


def test_rows_missing_because_of_a_prefix_cache_are_refused_with_both_lengths(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assembler = ShardAssembler(job, SAMPLES)
    add(assembler, 0)
    with pytest.raises(CaptureError, match=r"sample sample-001: stub-1 returned 36 rows .*expected 100 rows"):
        add(assembler, 1, rows=slice(64, None))
    assert job.finished_entry(job.shards[0]) is None


def test_other_ids_than_were_sent_are_refused(tmp_path: Path) -> None:
    assembler = ShardAssembler(make_job(tmp_path), SAMPLES)
    ids = SAMPLES[2].input_ids.tolist()
    changed = [*ids[:4], ids[4] + 1, *ids[5:]]
    with pytest.raises(CaptureError, match=f"ran token {ids[4] + 1} at position 4; expected {ids[4]}"):
        assembler.add(SAMPLES[2].key, changed, states_of(2))


def test_unknown_and_repeated_samples_are_refused(tmp_path: Path) -> None:
    assembler = ShardAssembler(make_job(tmp_path), SAMPLES)
    with pytest.raises(CaptureError, match="not asked for"):
        assembler.add("stranger", [1], torch.zeros(1, 4, 4))
    add(assembler, 0)
    with pytest.raises(CaptureError, match="twice"):
        add(assembler, 0)


def test_a_shard_that_lacks_samples_is_named_when_all_should_be_there(tmp_path: Path) -> None:
    assembler = ShardAssembler(make_job(tmp_path), SAMPLES)
    add(assembler, 0)
    with pytest.raises(CaptureError, match=r"no states for 1 samples of shard-00000.*: sample-001"):
        assembler.drain()


def test_a_fourth_unfinished_shard_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, samples_per_shard=1)
    job = job.model_copy(update={"shards": tuple(replace(s, end=s.start + 1) for s in job.shards)})
    assembler = ShardAssembler(job, SAMPLES)
    for index in range(3):
        assembler.place(SAMPLES[index].key, SAMPLES[index].input_ids.tolist(), len(SAMPLES[index]))
    with pytest.raises(CaptureError, match="at most 3"):
        assembler.place(SAMPLES[3].key, SAMPLES[3].input_ids.tolist(), len(SAMPLES[3]))


def test_a_failed_write_reaches_the_driver_and_leaves_no_file(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    assembler = ShardAssembler(job, SAMPLES)
    (tmp_path / job.shards[0].file_name).mkdir()
    add(assembler, 0)
    add(assembler, 1)
    with pytest.raises(CaptureError, match="cannot write"):
        assembler.drain()
    with pytest.raises(CaptureError, match="finished shards are kept"):
        job.raise_failure()
    assembler.close()
    assert not list(tmp_path.glob(".tmp*"))


def test_a_shard_is_written_while_its_samples_arrive_and_has_its_name_only_when_whole(tmp_path: Path) -> None:
    job = make_job(tmp_path, samples_per_shard=6)
    assembler = ShardAssembler(job, SAMPLES)
    size = 0
    for index in (0, 1, 2):
        add(assembler, index)
        assembler._writer.submit(lambda: None).result()
        assembler._open[0].write(job.entry_path(job.shards[0]))
        (partial,) = tmp_path.glob(".tmp-shard-00000*")
        grown = assembler._open[0]._file._writer.bytes  # type: ignore[union-attr]
        assert grown - size >= len(SAMPLES[index]) * 3 * 4 * 4
        assert partial.exists()
        size = grown
    assert not (tmp_path / job.shards[0].file_name).exists()
    for index in (5, 4, 3):
        add(assembler, index)
    assembler.drain()
    assembler.close()
    assert [sample.key for sample in ShardReader(tmp_path / job.shards[0].file_name)] == [
        s.key for s in SAMPLES
    ]
