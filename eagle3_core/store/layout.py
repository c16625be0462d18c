"""Where the bytes of a shard lie, so that one sample can be read and trusted alone; imports no torch.

Legend: S packed tokens, A auxiliary layers, H hidden size, R rows with a final state, n samples.

`shards` says what a shard holds. Here is its map, made from the header and the two small tensors of offsets
at the front of the file: any reader of byte ranges can fetch these, from a disk or from an object store.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from eagle3_core.errors import StoreError

SHARD_METADATA_KEY = "eagle3_shard"
FILE_ORDER = (
    "sample_offsets", "final_offsets", "final_rows", "input_ids", "aux_states", "final_states", "loss_mask",
    "sample_hashes",
)  # fmt: skip
"""Order of the tensors in a file: each starts at a multiple of its element size."""
HASH_ORDER = ("input_ids", "loss_mask", "aux_states", "final_states", "final_rows")
"""Order in which the parts of a sample are hashed."""
HASH_BYTES = 16
ELEMENT_BYTES = {"I64": 8, "I32": 4, "U8": 1, "BF16": 2, "F16": 2, "F32": 4}
INTEGER_DTYPES = {
    "sample_offsets": "I64", "final_offsets": "I64", "final_rows": "I64", "input_ids": "I32",
    "loss_mask": "U8", "sample_hashes": "U8",
}  # fmt: skip
FRONT_BYTES = 1 << 16
"""Read at once: enough for the header and offsets of most shards."""
MAX_HEADER_BYTES = 100_000_000

Block = bytes | bytearray | memoryview
Read = Callable[[int, int], bytes]
"""Reads `length` bytes at `start`; fewer only where the file ends."""


class ByteRange(NamedTuple):
    """Bytes [start, start + length) of a file."""

    start: int
    length: int


class SampleRanges(NamedTuple):
    """Where the parts of one sample lie, in the order of its hash, and the hash itself.

    Attributes:
        input_ids: [S] int32.
        loss_mask: [S] uint8.
        aux_states: [S, A, H].
        final_states: [R, H].
        final_rows: [R] int64.
        sample_hash: [16] uint8; None in a shard that was written without hashes of samples.
    """

    input_ids: ByteRange
    loss_mask: ByteRange
    aux_states: ByteRange
    final_states: ByteRange
    final_rows: ByteRange
    sample_hash: ByteRange | None


class StoredTensor(NamedTuple):
    """One tensor of a file: dtype as safetensors names it, shape, and where it lies in the file."""

    dtype: str
    shape: tuple[int, ...]
    place: ByteRange

    def rows(self, start: int, end: int) -> ByteRange:
        """Where the rows [start, end) of the first dimension lie."""
        row = ELEMENT_BYTES[self.dtype] * prod(self.shape[1:])
        return ByteRange(self.place.start + start * row, (end - start) * row)


@dataclass(frozen=True)
class ShardIndex:
    """The map of one shard.

    Attributes:
        name: of the shard, for messages.
        keys: of the samples, in order.
        aux_layer_ids: capture ids of `aux_states`.
        final_layer_id: capture id of `final_states`.
        final_state: policy of the rows with a final state.
        sample_offsets: [n + 1], rows of sample i are [offsets[i], offsets[i + 1]).
        final_offsets: [n + 1], the same for final states.
        tensors: all tensors by name.
        num_bytes: size of the whole file.
    """

    name: str
    keys: tuple[str, ...]
    aux_layer_ids: tuple[int, ...]
    final_layer_id: int
    final_state: str
    sample_offsets: tuple[int, ...]
    final_offsets: tuple[int, ...]
    tensors: Mapping[str, StoredTensor]
    num_bytes: int

    @classmethod
    def of_file(cls, path: Path) -> ShardIndex:
        """Read the map of a local shard.

        Raises:
            StoreError: not a shard, cut or too long, or its parts contradict each other.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"{path} is not a shard of hidden states ({error})") from error
        try:
            size = os.fstat(descriptor).st_size
            return cls.load(lambda start, length: os.pread(descriptor, length, start), str(path), size)
        finally:
            os.close(descriptor)

    @classmethod
    def load(cls, read: Read, name: str, num_bytes: int | None = None) -> ShardIndex:
        """Read the map of a shard through a reader of byte ranges: one call, or two for a large header.

        Args:
            read: reads `length` bytes at `start`.
            name: of the shard, for messages.
            num_bytes: size of the file, where it is known.

        Raises:
            StoreError: as `of_file`.
        """
        try:
            index = _parse(_Front(read), name)
        except (OSError, KeyError, IndexError, TypeError, ValueError, struct.error) as error:
            raise StoreError(f"{name} is not a shard of hidden states ({error})") from error
        if num_bytes is not None and num_bytes != index.num_bytes:
            raise StoreError(
                f"{name} is not a shard of hidden states: it has {num_bytes:,} bytes, "
                f"its header says {index.num_bytes:,}"
            )
        contradictions = _contradictions(index)
        if contradictions:
            raise StoreError(f"{name}: tensors and offsets contradict each other: {contradictions}")
        return index

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self.sample_offsets[-1]

    @property
    def dtype(self) -> str:
        """Of the states, as safetensors names it."""
        return self.tensors["aux_states"].dtype

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.tensors["aux_states"].shape[2]

    def sample_length(self, index: int) -> int:
        """Tokens of one sample."""
        return self.sample_offsets[index + 1] - self.sample_offsets[index]

    def ranges(self, index: int) -> SampleRanges:
        """Where the bytes of one sample lie."""
        rows = self.sample_offsets[index : index + 2]
        final = self.final_offsets[index : index + 2]
        tensors = self.tensors
        hashes = tensors.get("sample_hashes")
        return SampleRanges(
            input_ids=tensors["input_ids"].rows(*rows),
            loss_mask=tensors["loss_mask"].rows(*rows),
            aux_states=tensors["aux_states"].rows(*rows),
            final_states=tensors["final_states"].rows(*final),
            final_rows=tensors["final_rows"].rows(*final),
            sample_hash=hashes.rows(index, index + 1) if hashes else None,
        )


def sample_hash(parts: Iterable[Block]) -> bytes:
    """xxh3_128 digest of the bytes of a sample's parts, which come in `HASH_ORDER`."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def check_sample(index: ShardIndex, number: int, parts: Iterable[Block], stored: Block | None) -> None:
    """Compare a sample's bytes with the hash beside them, if the shard has hashes of samples.

    Args:
        index: map of the shard.
        number: of the sample in the shard.
        parts: its bytes in `HASH_ORDER`.
        stored: its row of `sample_hashes`; None in a shard without.

    Raises:
        StoreError: they differ; names shard and key.
    """
    if stored is not None and sample_hash(parts) != bytes(stored):
        raise StoreError(
            f"{index.name}: the sample {index.keys[number]} does not match its hash",
            remedy="run the stages extract and verify again: the shard is made anew",
        )


class _Front:
    """The beginning of a file, as much of it as was asked for; reads generously, so that once is enough."""

    def __init__(self, read: Read) -> None:
        self._read, self._bytes = read, read(0, FRONT_BYTES)

    def __call__(self, start: int, length: int) -> bytes:
        end = start + length
        if end > len(self._bytes):
            self._bytes += self._read(len(self._bytes), end - len(self._bytes))
        if end > len(self._bytes):
            raise ValueError(f"it ends after {len(self._bytes):,} bytes")
        return self._bytes[start:end]


def _parse(front: _Front, name: str) -> ShardIndex:
    (length,) = struct.unpack("<Q", front(0, 8))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes")
    header: dict[str, Any] = json.loads(front(8, length))
    description = json.loads(header.pop("__metadata__", {})[SHARD_METADATA_KEY])
    tensors, end = _tensors(header, 8 + length)
    offsets = {
        which: tuple(np.frombuffer(front(*tensors[which].place), "<i8").tolist())
        for which in ("sample_offsets", "final_offsets")
    }
    return ShardIndex(
        name=name,
        keys=tuple(description["keys"]),
        aux_layer_ids=tuple(description["aux_layer_ids"]),
        final_layer_id=description["final_layer_id"],
        final_state=description["final_state"],
        tensors=tensors,
        num_bytes=end,
        **offsets,
    )


def _tensors(header: dict[str, Any], data: int) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of a header, whose bytes start at `data`, and where the last one ends.

    Raises:
        ValueError: one is missing or unknown, or their places overlap, leave gaps or do not fit the shapes.
    """
    missing = set(FILE_ORDER) - {"sample_hashes"} - header.keys()
    unknown = header.keys() - set(FILE_ORDER)
    if missing or unknown:
        raise ValueError(f"it lacks {sorted(missing)} and has besides {sorted(unknown)}")
    tensors: dict[str, StoredTensor] = {}
    end = 0
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (start, stop), dtype, shape = fields["data_offsets"], fields["dtype"], tuple(fields["shape"])
        if dtype not in ELEMENT_BYTES or dtype != INTEGER_DTYPES.get(name, dtype):
            raise ValueError(f"{name} is {dtype}")
        if start != end or stop - start != ELEMENT_BYTES[dtype] * prod(shape):
            raise ValueError(f"{name} has the bytes {start:,} to {stop:,} for the shape {list(shape)}")
        tensors[name] = StoredTensor(dtype, shape, ByteRange(data + start, stop - start))
        end = stop
    return tensors, data + end


def _contradictions(index: ShardIndex) -> str:
    shapes = {name: list(tensor.shape) for name, tensor in index.tensors.items()}
    tokens, rows = shapes["input_ids"][0], shapes["final_rows"][0]
    num, hidden = len(index.keys), shapes["aux_states"][2:3]
    expected = {
        "sample_offsets": [num + 1],
        "final_offsets": [num + 1],
        "input_ids": [tokens],
        "final_rows": [rows],
        "loss_mask": [tokens],
        "aux_states": [tokens, len(index.aux_layer_ids), *hidden],
        "final_states": [rows, *hidden],
        "sample_hashes": [num, HASH_BYTES],
    }
    found = [
        f"{name} {shape} instead of {expected[name]}"
        for name, shape in shapes.items()
        if shape != expected[name]
    ]
    for name, offsets, end in (
        ("sample_offsets", index.sample_offsets, tokens),
        ("final_offsets", index.final_offsets, rows),
    ):
        rising = all(before <= after for before, after in pairwise(offsets))
        if not rising or offsets[:1] != (0,) or offsets[-1:] != (end,):
            found.append(f"{name} do not run from 0 to {end}")
    return "; ".join(found)
