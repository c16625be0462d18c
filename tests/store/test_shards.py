"""Shards: planning by bytes, one-pass writing, reading, and what a kill -9 leaves."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.errors import StoreError
from eagle3_core.identity import STEP_VERSION
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import TEMPORARY_PREFIX, file_entry, file_problem
from eagle3_core.store.layout import SHARD_METADATA_KEY, ShardIndex
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shard_writer import write_packed_shard, write_shard
from eagle3_core.store.shards import (
    CapturedSample,
    PackedShard,
    ShardLayout,
    ShardReader,
    decode_sample,
    plan_shards,
    shard_file_bytes,
)
from tests.kills import num_kills

pytestmark = pytest.mark.engine

LAYOUT = ShardLayout((2, 4, 5), 8, hidden_size=4, dtype="bfloat16", final_state="loss_rows")


def sample(key: str, mask: list[int]) -> Sample:
    ids = np.arange(len(mask), dtype=np.int32) + 10
    return Sample(key, "k", "train", ids, np.array(mask, np.uint8), 1, "stop")


def captured(of: Sample, seed: int) -> CapturedSample:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.from_numpy(of.final_rows("loss_rows"))
    return CapturedSample(
        key=of.key,
        input_ids=torch.from_numpy(of.input_ids),
        loss_mask=torch.from_numpy(of.loss_mask),
        aux_states=torch.randn(len(of), 3, 4, generator=generator).bfloat16(),
        final_states=torch.randn(len(rows), 4, generator=generator).bfloat16(),
        final_rows=rows,
    )


SAMPLES = [sample("a", [0, 0, 1]), sample("b", [1, 1]), sample("c", [0, 0])]


def test_bytes_of_a_sample_count_all_aux_rows_and_the_final_rows_that_a_loss_reads() -> None:
    assert LAYOUT.sample_bytes(SAMPLES[0]) == 2 * 4 * (3 * 3 + 1)
    assert LAYOUT.sample_bytes(SAMPLES[1]) == 2 * 4 * (3 * 2 + 1)
    everything = ShardLayout((2, 4, 5), 8, hidden_size=64, dtype="bfloat16", final_state="all")
    assert everything.sample_bytes(SAMPLES[0]) == 3 * 512


def test_shards_are_cut_in_order_below_the_limit_and_hold_one_sample_at_least() -> None:
    sizes = [LAYOUT.sample_bytes(s) for s in SAMPLES]
    assert sizes == [80, 56, 48]
    assert [(s.start, s.end, s.bytes) for s in plan_shards(SAMPLES, LAYOUT, 136)] == [(0, 2, 136), (2, 3, 48)]
    assert [(s.start, s.end) for s in plan_shards(SAMPLES, LAYOUT, 10)] == [(0, 1), (1, 2), (2, 3)]
    assert plan_shards([], LAYOUT, 10) == []


def test_what_is_written_is_read_back_and_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    parts = [captured(s, seed) for seed, s in enumerate(SAMPLES)]
    path = tmp_path / "shard-00000.safetensors"
    entry = write_shard(path, parts, LAYOUT)
    assert entry.xxh3_128 == file_entry(tmp_path, path).xxh3_128
    assert entry.bytes == path.stat().st_size == shard_file_bytes(SAMPLES, LAYOUT)
    assert entry.facts == {"num_samples": 3, "num_tokens": 7, "num_final_rows": 2, "state_bytes": 184}
    reader = ShardReader(path)
    assert (reader.keys, reader.aux_layer_ids, reader.final_layer_id) == (["a", "b", "c"], (2, 4, 5), 8)
    for part, read in zip(parts, reader, strict=True):
        assert torch.equal(read.aux_states, part.aux_states)
        assert torch.equal(read.final_states, part.final_states)
        assert torch.equal(read.input_ids, part.input_ids)
    assert [read.final_rows.tolist() for read in reader] == [[2], [1], []]
    assert load_file(path)["sample_offsets"].tolist() == [0, 3, 5, 7]
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert "before the final norm" in header["__metadata__"][SHARD_METADATA_KEY]
    assert all(header[name]["data_offsets"][0] % 4 == 0 for name in ("aux_states", "final_states"))


def test_a_shard_of_fixed_states_changes_only_with_its_step_version(tmp_path: Path) -> None:
    """Golden output: when this fails and the change is meant, raise `STEP_VERSION["capture"]` too."""
    packed = PackedShard(SAMPLES, LAYOUT)
    for states in (packed.aux_states, packed.final_states):
        states.copy_(torch.arange(states.numel()).view(states.shape))
    entry = write_packed_shard(tmp_path / "shard-00000.safetensors", packed)
    assert (STEP_VERSION["capture"], entry.xxh3_128) == (2, "62b2513abc842cfe6da8734ca4750dc4")


def test_filling_a_packed_shard_sample_by_sample_gives_the_same_bytes(tmp_path: Path) -> None:
    parts = [captured(s, seed) for seed, s in enumerate(SAMPLES)]
    packed = PackedShard(SAMPLES, LAYOUT)
    for index in (2, 0, 1):
        place = packed.sample(index)
        place.aux_states.copy_(parts[index].aux_states)
        place.final_states.copy_(parts[index].final_states)
    first = write_packed_shard(tmp_path / "a.safetensors", packed)
    assert first.xxh3_128 == write_shard(tmp_path / "b.safetensors", parts, LAYOUT).xxh3_128


def test_states_of_the_wrong_shape_dtype_or_rows_are_refused_with_the_key(tmp_path: Path) -> None:
    good = captured(SAMPLES[0], 0)
    short = CapturedSample(**{**vars(good), "aux_states": good.aux_states[1:]})
    wide = CapturedSample(**{**vars(good), "aux_states": good.aux_states.float()})
    rows = CapturedSample(**{**vars(good), "final_rows": torch.tensor([1])})
    for bad, message in (
        (short, r"sample a: aux_states has shape \(2, 3, 4\)"),
        (wide, "float32"),
        (rows, "a"),
    ):
        with pytest.raises(StoreError, match=message):
            write_shard(tmp_path / "s.safetensors", [bad], LAYOUT)
    assert list(tmp_path.iterdir()) == []


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(str(path), framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize("name", ["sample_hashes", "aux_states", "loss_mask", "final_rows", "input_ids"])
def test_a_shard_that_is_whole_but_contradicts_itself_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s.safetensors"
    write_shard(path, [captured(s, 0) for s in SAMPLES], LAYOUT)
    tensors = load_file(path)
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, path, metadata=metadata_of(path))
    with pytest.raises(StoreError, match="contradict"):
        ShardReader(path)


def test_something_else_is_not_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(StoreError, match="not a shard"):
        ShardReader(path)
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="not a shard"):
        ShardReader(path)


PLAN = ArtifactPlan(kind="capture", identity={"loop": 1})
NUM_SHARDS = 6


def write_missing(store: LocalStore) -> dict[str, str]:
    """Write what is missing of six shards and complete; returns file names and hashes."""
    with store.writer(PLAN) as writer:
        for index in range(NUM_SHARDS):
            name = f"shard-{index:05d}.safetensors"
            if name not in writer.files:
                parts = [captured(s, index) for s in SAMPLES]
                writer.record(write_shard(writer.folder / name, parts, LAYOUT))
        manifest = writer.complete()
    return {entry.path: entry.xxh3_128 for entry in manifest.files}


@pytest.mark.timeout(3600)
def test_kill_9_at_any_moment_leaves_no_half_file_and_a_rerun_ends_with_the_same_hashes(
    tmp_path: Path,
) -> None:
    seconds = []
    for number in range(4):  # the host may stand still in one of them
        started = time.monotonic()
        wanted = write_missing(LocalStore(tmp_path / f"straight-{number}"))
        seconds.append(time.monotonic() - started)
    duration = min(seconds)
    assert len(wanted) == NUM_SHARDS
    moments, killed = random.Random(), 0
    for round_number in range(num_kills(20)):
        store = LocalStore(tmp_path / str(round_number))
        child = os.fork()
        if child == 0:
            write_missing(store)
            os._exit(0)
        time.sleep(moments.uniform(0.0, duration))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        check_after_kill(store)
        assert write_missing(store) == wanted
    assert killed > 0


def check_after_kill(store: LocalStore) -> None:
    manifest = store.find(PLAN.ref)
    folder = store.folder(PLAN.ref)
    for entry in manifest.files if manifest else ():
        assert file_problem(folder, entry) is None
    for path in folder.glob("*.safetensors"):
        assert not path.name.startswith(TEMPORARY_PREFIX)
        assert len(ShardReader(path)) == len(SAMPLES)


def read_by_ranges(path: Path, number: int) -> CapturedSample:
    """Read one sample as from an object store: a few ranges of bytes, nothing else."""
    data = path.read_bytes()

    def read(start: int, length: int) -> bytes:
        return data[start : start + length]

    index = ShardIndex.load(read, "s3://bucket/shard", len(data))
    return decode_sample(index, number, [bytearray(read(*place)) for place in index.ranges(number) if place])


def test_a_sample_is_read_by_ranges_of_bytes_and_trusted_by_its_own_hash(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    parts = [captured(s, seed) for seed, s in enumerate(SAMPLES)]
    write_shard(path, parts, LAYOUT)
    for number, part in enumerate(parts):
        read = read_by_ranges(path, number)
        assert read.key == part.key
        for name in ("input_ids", "loss_mask", "aux_states", "final_states", "final_rows"):
            assert torch.equal(getattr(read, name), getattr(part, name))
    stored = [xxhash.xxh3_128() for _ in parts]
    for digest, part in zip(stored, parts, strict=True):
        for name in ("input_ids", "loss_mask", "aux_states", "final_states", "final_rows"):
            tensor = getattr(part, name)
            digest.update(
                (tensor.view(torch.int16) if tensor.is_floating_point() else tensor).numpy().tobytes()
            )
    hashes = load_file(path)["sample_hashes"]
    assert [bytes(row.tolist()) for row in hashes] == [digest.digest() for digest in stored]


@pytest.mark.parametrize("name", ["input_ids", "loss_mask", "aux_states", "final_states", "final_rows"])
def test_one_flipped_bit_is_found_in_its_sample_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s.safetensors"
    write_shard(path, [captured(s, 0) for s in SAMPLES], LAYOUT)
    place = getattr(ShardIndex.of_file(path).ranges(1), name)
    data = bytearray(path.read_bytes())
    data[place.start] ^= 1
    path.write_bytes(data)
    reader = ShardReader(path)
    assert reader.sample(0).key == "a"
    with pytest.raises(StoreError, match=r"s\.safetensors: the sample b does not match its hash"):
        reader.sample(1)
    with pytest.raises(StoreError, match="the sample b does not match"):
        read_by_ranges(path, 1)


def test_a_shard_without_hashes_of_samples_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write_shard(path, [captured(s, 0) for s in SAMPLES], LAYOUT)
    tensors, metadata = load_file(path), metadata_of(path)
    wanted = list(ShardReader(path))
    del tensors["sample_hashes"]
    save_file(tensors, path, metadata=metadata)
    for before, now in zip(wanted, ShardReader(path), strict=True):
        assert torch.equal(before.aux_states, now.aux_states)
    assert ShardIndex.of_file(path).ranges(0).sample_hash is None


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: d[:4], lambda d: d[:200]]
)
def test_a_shard_that_is_cut_or_too_long_is_refused_when_it_is_opened(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "s.safetensors"
    write_shard(path, [captured(s, 0) for s in SAMPLES], LAYOUT)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StoreError, match="not a shard"):
        ShardReader(path)


def test_a_sha256_is_recorded_beside_the_fast_hash_when_it_is_asked_for(tmp_path: Path) -> None:
    packed = PackedShard(SAMPLES, LAYOUT)
    plain = write_packed_shard(tmp_path / "a.safetensors", packed)
    both = write_packed_shard(tmp_path / "b.safetensors", packed, with_sha256=True)
    assert plain.sha256 is None
    assert both.sha256 == hashlib.sha256((tmp_path / "b.safetensors").read_bytes()).hexdigest()
    assert plain.xxh3_128 == both.xxh3_128
