"""Single samples by byte ranges: the same from a file and from the cache, trusted by their own hash."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_core.artifacts import ArtifactPlan, ArtifactRef, Manifest
from eagle3_core.errors import StoreError
from eagle3_core.store import samples as samples_module
from eagle3_core.store.layout import ByteRange
from eagle3_core.store.local import LocalStore
from eagle3_core.store.sample_cache import SampleCache
from eagle3_core.store.samples import SamplePlace, SampleSource, adjacent, pieces
from eagle3_core.store.shard_writer import write_shard
from eagle3_core.store.shards import CapturedSample, ShardLayout, ShardReader

pytestmark = pytest.mark.engine
PLAN = ArtifactPlan(kind="capture", identity={"test": 1})
LAYOUT = ShardLayout(
    aux_layer_ids=(1, 2, 3), final_layer_id=4, hidden_size=64, dtype="bfloat16", final_state="loss_rows"
)
LENGTHS = ((5, 40, 7), (100, 3))
PLACES = [
    SamplePlace(f"shard-{s:05d}.safetensors", i) for s, group in enumerate(LENGTHS) for i in range(len(group))
]


def random_sample(key: str, length: int) -> CapturedSample:
    mask = torch.from_numpy((np.arange(length) >= length // 2).astype(np.uint8))
    rows = 1 + mask[1:].nonzero().squeeze(-1)
    return CapturedSample(
        key=key,
        input_ids=torch.randint(0, 1000, (length,), dtype=torch.int32),
        loss_mask=mask,
        aux_states=torch.randn(length, 3, 64).bfloat16(),
        final_states=torch.randn(len(rows), 64).bfloat16(),
        final_rows=rows,
    )


class Counting(LocalStore):
    """Counts what is read at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()

    def read_into(self, ref: ArtifactRef, path: str, start: int, block: memoryview) -> None:
        with self._lock:
            self.ranges.append((path, start, len(block)))
        super().read_into(ref, path, start, block)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Counting, Manifest]:
    store = Counting(tmp_path / "store")
    with store.writer(PLAN) as writer:
        for number, group in enumerate(LENGTHS):
            samples = [random_sample(f"sample-{number}-{i}", length) for i, length in enumerate(group)]
            writer.record(write_shard(writer.folder / f"shard-{number:05d}.safetensors", samples, LAYOUT))
        return store, writer.complete()


def assert_same(found: CapturedSample, expected: CapturedSample) -> None:
    assert found.key == expected.key
    for name in ("input_ids", "loss_mask", "aux_states", "final_states", "final_rows"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


def reader(store: LocalStore, place: SamplePlace) -> ShardReader:
    return ShardReader(store.folder(PLAN.ref) / place.shard)


def damage(store: LocalStore, place: SamplePlace) -> None:
    """Flip a bit in the last of a sample's final states."""
    states = reader(store, place).index.ranges(place.number).final_states
    with (store.folder(PLAN.ref) / place.shard).open("r+b") as file:
        file.seek(states.start + states.length - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_sample_is_the_one_that_was_stored_from_the_store_and_from_the_cache(
    tmp_path: Path, stored: tuple[Counting, Manifest], is_cached: bool
) -> None:
    store, manifest = stored
    source = SampleSource(store, manifest, SampleCache(tmp_path / "cache", 1 << 20) if is_cached else None)
    for _ in range(2):
        for place in PLACES:
            assert_same(source.sample(place), reader(store, place).sample(place.number))
    states = sum(source.num_bytes(place) for place in PLACES)
    assert source.counts.from_origin == (states if is_cached else 2 * states)
    assert source.counts.from_cache == (states if is_cached else 0)


def test_the_maps_of_shards_are_read_without_their_states(stored: tuple[Counting, Manifest]) -> None:
    store, manifest = stored
    source = SampleSource(store, manifest)
    maps = source.load()
    assert [shard.keys for shard in maps.values()] == [
        ("sample-0-0", "sample-0-1", "sample-0-2"), ("sample-1-0", "sample-1-1"),
    ]  # fmt: skip
    before = len(store.ranges)
    assert source.load() == maps
    assert len(store.ranges) == before
    source.sample(PLACES[1])
    assert len(store.ranges) == before + 2  # auxiliary and final states


def test_a_damaged_entry_of_the_cache_is_read_again_from_the_store(
    tmp_path: Path, stored: tuple[Counting, Manifest]
) -> None:
    store, manifest = stored
    source = SampleSource(store, manifest, SampleCache(tmp_path / "cache", 1 << 20))
    source.sample(PLACES[0])
    (entry,) = [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]
    content = bytearray(entry.read_bytes())
    content[17] ^= 4
    entry.write_bytes(content)
    assert_same(source.sample(PLACES[0]), reader(store, PLACES[0]).sample(0))
    assert source.counts.num_damaged == 1
    source.sample(PLACES[0])
    assert source.counts.from_cache == source.num_bytes(PLACES[0])


def test_a_damaged_sample_is_refused_and_named_and_the_others_are_read(
    stored: tuple[Counting, Manifest],
) -> None:
    store, manifest = stored
    damage(store, PLACES[1])
    source = SampleSource(store, manifest)
    with pytest.raises(
        StoreError, match=r"sample-0-1 in capture/.*/shard-00000.*does not match its hash"
    ) as found:
        source.sample(PLACES[1])
    assert "\n" not in str(found.value)
    assert "extract and verify" in str(found.value)
    assert source.counts.num_damaged == 2, "read twice: it may have been the way"
    source.sample(PLACES[2])


def test_a_lost_shard_is_one_line_that_names_it(stored: tuple[Counting, Manifest]) -> None:
    store, manifest = stored
    source = SampleSource(store, manifest)
    source.load()
    lost = store.folder(PLAN.ref) / PLACES[3].shard
    lost.unlink()
    with pytest.raises(StoreError, match=rf"sample-1-0 in capture/.*cannot be read: {lost}"):
        source.sample(PLACES[3])
    with pytest.raises(StoreError, match=r"shard-00001.safetensors cannot be read"):
        SampleSource(store, manifest).load()


def test_samples_come_in_the_asked_order_and_few_bytes_wait(stored: tuple[Counting, Manifest]) -> None:
    store, manifest = stored
    order = [PLACES[i] for i in (3, 0, 4, 1, 2, 0, 3)]
    largest = SampleSource(store, manifest).num_bytes(PLACES[3])
    for limit in (1, largest + 1, 1 << 30):
        source = SampleSource(store, manifest, num_threads=3, ahead_bytes=limit)
        with source.ahead(order) as found:
            first = next(found)
            waiting = source.counts.from_origin
            assert waiting <= max(limit, largest)
            keys = [first.key, *(sample.key for sample in found)]
        assert keys == [reader(store, place).keys[place.number] for place in order]


def test_an_unreadable_sample_is_raised_in_its_turn(stored: tuple[Counting, Manifest]) -> None:
    store, manifest = stored
    damage(store, PLACES[1])
    with SampleSource(store, manifest).ahead(PLACES) as found:
        assert next(found).key == "sample-0-0"
        with pytest.raises(StoreError, match="sample-0-1"):
            next(found)


def test_a_small_cache_keeps_its_limit_and_still_serves_every_epoch(
    tmp_path: Path, stored: tuple[Counting, Manifest]
) -> None:
    store, manifest = stored
    cache = SampleCache(tmp_path / "cache", 24 << 10)
    source = SampleSource(store, manifest, cache)
    source.keep_from(time.time())
    for epoch in range(3):
        with source.ahead(PLACES[epoch:] + PLACES[:epoch]) as found:
            assert len(list(found)) == len(PLACES)
        assert cache.bytes_taken() <= cache.limit
    assert source.counts.from_cache > 0


def test_large_ranges_are_cut_and_adjacent_ones_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "RANGE_BYTES", 4)
    assert pieces(ByteRange(10, 9)) == [(10, 4), (14, 4), (18, 1)]
    assert pieces(ByteRange(10, 0)) == []
    assert adjacent([ByteRange(4, 2), ByteRange(0, 4), ByteRange(8, 1), ByteRange(9, 0)]) == [(0, 6), (8, 1)]
