"""Reads single captured samples, wherever the capture lies: by byte ranges, each trusted by its own hash.

The small tensors of a shard (offsets, ids, masks, rows, hashes) are read once and stay in memory, about 13
bytes a token; a sample's states are read when they are asked for, two ranges of one file or of one object.
Of a store that is reached over a network they are kept in a cache on the local disk, and fetched ahead by
several threads where the order is known.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from eagle3_core.artifacts import Manifest
from eagle3_core.config import RunConfig
from eagle3_core.errors import LostObjectError, ObjectStoreError, StoreError
from eagle3_core.store.layout import Block, ByteRange, ShardIndex
from eagle3_core.store.local import LocalStore
from eagle3_core.store.sample_cache import SampleCache, empty_block
from eagle3_core.store.shards import CapturedSample, decode_sample

MAKE_AGAIN = (
    "run the stages extract and verify again: only that shard is made anew; training then goes on from its "
    "last checkpoint"
)
KEPT_TENSORS = ("final_rows", "input_ids", "loss_mask", "sample_hashes")
"""Read with the index of a shard: small beside the states."""
RANGE_BYTES = 64 << 20
"""More bytes than this are read in several ranges."""
READING_THREADS = 4
AHEAD_BYTES = 128 << 20
"""Samples that are read ahead from a local disk."""


class SampleDamagedError(StoreError):
    """What was read of a sample does not match its hash."""


class SamplePlace(NamedTuple):
    """One sample of a capture: the file name of its shard, and its number in it."""

    shard: str
    number: int


@dataclass
class ReadCounts:
    """What a source has read; bytes of states."""

    from_origin: int = 0
    from_cache: int = 0
    num_damaged: int = 0


@dataclass(frozen=True)
class _Shard:
    index: ShardIndex
    kept: dict[int, bytes]

    def part(self, place: ByteRange) -> memoryview:
        """Bytes of the tensors in `KEPT_TENSORS`, from memory."""
        if not place.length:
            return memoryview(b"")
        for start, content in self.kept.items():
            if start <= place.start and place.start + place.length <= start + len(content):
                return memoryview(content)[place.start - start :][: place.length]
        raise AssertionError(f"{place} is not among the parts that are kept")


class SampleSource:
    """The samples of one complete capture; safe to use from several threads.

    Args:
        store: any store.
        manifest: of the capture.
        cache: keeps states on the local disk; None reads them from the store each time.
        num_threads: reads at once.
        ahead_bytes: states in memory that `ahead` has fetched or is fetching.
    """

    def __init__(
        self,
        store: LocalStore,
        manifest: Manifest,
        cache: SampleCache | None = None,
        num_threads: int = READING_THREADS,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._store, self._manifest, self._cache = store, manifest, cache
        self._num_threads, self._ahead_bytes = num_threads, ahead_bytes
        self._shards: dict[str, _Shard] = {}
        self._lock = threading.Lock()
        self.counts = ReadCounts()

    @property
    def shard_names(self) -> list[str]:
        """The shard files of the capture, in order."""
        return sorted(entry.path for entry in self._manifest.files if entry.path.endswith(".safetensors"))

    def load(self) -> dict[str, ShardIndex]:
        """The maps of all shards by file name, read side by side.

        Raises:
            StoreError: names a shard that cannot be read.
        """
        names = self.shard_names
        if not names:
            raise StoreError(f"{self._manifest.ref} has no shards", remedy="run the stage extract again")
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="shard-index") as pool:
            return dict(zip(names, pool.map(lambda name: self._shard(name).index, names), strict=True))

    def num_bytes(self, place: SamplePlace) -> int:
        """Bytes of a sample's states."""
        ranges = self._shard(place.shard).index.ranges(place.number)
        return ranges.aux_states.length + ranges.final_states.length

    def loss_mask(self, place: SamplePlace) -> np.ndarray:
        """[S] bool, a sample's loss mask; from memory."""
        shard = self._shard(place.shard)
        return np.frombuffer(shard.part(shard.index.ranges(place.number).loss_mask), np.uint8) != 0

    def sample(self, place: SamplePlace) -> CapturedSample:
        """One sample, proven by its hash.

        Raises:
            StoreError: it cannot be read, or what is read twice does not match; names shard and object.
        """
        shard = self._shard(place.shard)
        return self._cached(shard, place.number) or self._fetched(shard, place)

    @contextlib.contextmanager
    def ahead(self, places: Iterable[SamplePlace]) -> Iterator[Iterator[CapturedSample]]:
        """Iterate over samples in the given order while later ones are fetched.

        At most `ahead_bytes` of states wait or are on their way, and one sample at least.

        Raises:
            StoreError: as `sample`, when its turn comes.
        """
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="sample")
        try:
            yield self._in_order(iter(places), pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _in_order(self, places: Iterator[SamplePlace], pool: ThreadPoolExecutor) -> Iterator[CapturedSample]:
        waiting: deque[tuple[int, Future[CapturedSample]]] = deque()
        in_flight, following = 0, next(places, None)
        while following is not None or waiting:
            while following is not None:
                size = self.num_bytes(following)
                if waiting and in_flight + size > self._ahead_bytes:
                    break
                waiting.append((size, pool.submit(self.sample, following)))
                in_flight, following = in_flight + size, next(places, None)
            size, first = waiting.popleft()
            yield first.result()
            in_flight -= size

    def keep_from(self, moment: float) -> None:
        """Let the cache keep what has been read since `moment` (seconds since the epoch of the clock)."""
        if self._cache is not None:
            self._cache.keep_from = moment

    def _shard(self, name: str) -> _Shard:
        shard = self._shards.get(name)
        if shard is None:
            shard = self._shards[name] = self._read_shard(name)
        return shard

    def _read_shard(self, name: str) -> _Shard:
        entry = self._manifest.file(name)
        if entry is None:
            raise StoreError(
                f"{self._manifest.ref} has no shard {name}", remedy="run the stage extract again"
            )

        def read(start: int, length: int) -> bytes:
            return self._read(name, ByteRange(start, min(length, entry.bytes - start)))

        with self._told(name):
            index = ShardIndex.load(read, f"{self._manifest.ref}/{name}", entry.bytes)
            places = [index.tensors[each].place for each in KEPT_TENSORS if each in index.tensors]
            return _Shard(index, {place.start: read(*place) for place in adjacent(places)})

    def _cached(self, shard: _Shard, number: int) -> CapturedSample | None:
        ranges = shard.index.ranges(number)
        if self._cache is None or ranges.sample_hash is None:
            return None
        name = shard.part(ranges.sample_hash).hex()
        states = self._cache.get(name, ranges.aux_states.length + ranges.final_states.length)
        if states is None:
            return None
        try:
            sample = _decoded(shard, number, states)
        except StoreError:
            self._cache.drop(name)
            self._count(num_damaged=1)
            return None
        self._count(from_cache=len(states))
        return sample

    def _fetched(self, shard: _Shard, place: SamplePlace) -> CapturedSample:
        ranges, key = shard.index.ranges(place.number), shard.index.keys[place.number]
        with self._told(place.shard, key):
            try:
                states, sample = self._read_sample(shard, place)
            except SampleDamagedError:  # on the way here, perhaps
                states, sample = self._read_sample(shard, place)
        if self._cache is not None and ranges.sample_hash is not None:
            self._cache.put(shard.part(ranges.sample_hash).hex(), states)
        return sample

    def _read_sample(self, shard: _Shard, place: SamplePlace) -> tuple[memoryview, CapturedSample]:
        ranges = shard.index.ranges(place.number)
        states = self._read_states(place.shard, (ranges.aux_states, ranges.final_states))
        self._count(from_origin=len(states))
        try:
            return states, _decoded(shard, place.number, states)
        except StoreError as error:
            self._count(num_damaged=1)
            raise SampleDamagedError(error.found) from error

    def _read_states(self, name: str, places: Sequence[ByteRange]) -> memoryview:
        """The bytes of several ranges, one after the other."""
        states = empty_block(sum(place.length for place in places))
        filled = 0
        for place in chain.from_iterable(map(pieces, places)):
            block = states[filled : filled + place.length]
            self._store.read_into(self._manifest.ref, name, place.start, block)
            filled += place.length
        return states

    def _read(self, name: str, place: ByteRange) -> bytes:
        return self._store.read_range(self._manifest.ref, name, place.start, place.length)

    @contextlib.contextmanager
    def _told(self, name: str, key: str | None = None) -> Iterator[None]:
        """Say which shard, and which sample, could not be read."""
        what = f"the sample {key} in {self._name(name)}" if key else self._name(name)
        try:
            yield
        except StoreError as error:
            if isinstance(error, ObjectStoreError) and not isinstance(error, LostObjectError):
                raise  # nothing is known to be lost, and the error names the object and what to do
            raise StoreError(
                f"{what} cannot be read: {error.found}",
                expected=error.expected,
                remedy=MAKE_AGAIN,
            ) from error

    def _name(self, shard: str) -> str:
        return f"{self._manifest.ref}/{shard}"

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.counts, name, getattr(self.counts, name) + count)


def open_samples(config: RunConfig, store: LocalStore, manifest: Manifest) -> SampleSource:
    """The samples of a complete capture in the store of a run, cached on the local disk if it is in `s3://`."""
    if config.object_root is None:
        return SampleSource(store, manifest)
    settings = config.object_store
    cache = SampleCache(config.workspace_path / "cache" / "samples", int(settings.cache_bytes))
    return SampleSource(store, manifest, cache, settings.max_connections, int(settings.read_ahead_bytes))


def adjacent(places: Iterable[ByteRange]) -> list[ByteRange]:
    """The same bytes in as few ranges as possible: [0, 4) and [4, 6) are read as one."""
    joined: list[ByteRange] = []
    for place in sorted(places):
        if joined and sum(joined[-1]) == place.start:
            joined[-1] = ByteRange(joined[-1].start, joined[-1].length + place.length)
        elif place.length:
            joined.append(place)
    return joined


def pieces(place: ByteRange) -> list[ByteRange]:
    """A range cut into ranges of at most `RANGE_BYTES`."""
    end = place.start + place.length
    starts = range(place.start, end, RANGE_BYTES)
    return [ByteRange(start, min(RANGE_BYTES, end - start)) for start in starts]


def _decoded(shard: _Shard, number: int, states: memoryview) -> CapturedSample:
    """A sample over its states' bytes and what is kept of the others.

    Raises:
        StoreError: they do not match the sample's hash.
    """
    ranges = shard.index.ranges(number)
    num_aux = ranges.aux_states.length
    blocks: list[Block] = [
        bytearray(shard.part(ranges.input_ids)),
        bytearray(shard.part(ranges.loss_mask)),
        states[:num_aux],
        states[num_aux:],
        bytearray(shard.part(ranges.final_rows)),
    ]
    if ranges.sample_hash is not None:
        blocks.append(shard.part(ranges.sample_hash))
    return decode_sample(shard.index, number, blocks)
