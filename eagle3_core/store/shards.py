"""Shards of captured hidden states.

Legend: S packed tokens, A auxiliary layers, H hidden size, R rows with a final state, n samples.

A shard is one safetensors file:

    sample_offsets  [n + 1]    int64, rows of sample i are [offsets[i], offsets[i+1])
    final_offsets   [n + 1]    int64, the same for final_states
    final_rows      [R]        int64, row inside its sample
    input_ids       [S]        int32
    aux_states      [S, A, H]  states by auxiliary capture id, in the order of the metadata
    final_states    [R, H]     states before the final norm, for the rows that `final_rows` names
    loss_mask       [S]        uint8
    sample_hashes   [n, 16]    uint8, xxh3_128 of a sample's ids, mask, auxiliary and final states, rows

Keys, capture ids and the final-state policy are in the metadata. Two samples of three and two tokens, final
states of the rows that a loss reads:

    input_ids        a0 a1 a2 b0 b1          sample_offsets  0 3 5
    loss_mask         0  0  1  0  1          final_rows      2 1
    final_states           f2    f1          final_offsets   0 1 2

Planning needs no torch; reading and writing does (for bf16). `layout` says where the bytes of a sample lie.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3_core.errors import StoreError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.layout import (
    ELEMENT_BYTES,
    FILE_ORDER,
    HASH_BYTES,
    HASH_ORDER,
    INTEGER_DTYPES,
    SHARD_METADATA_KEY,
    Block,
    ByteRange,
    ShardIndex,
    check_sample,
)

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True)
class ShardLayout:
    """What all shards of a capture have in common."""

    aux_layer_ids: tuple[int, ...]
    final_layer_id: int
    hidden_size: int
    dtype: str
    final_state: Literal["loss_rows", "all"]

    def sample_bytes(self, sample: Sample) -> int:
        """Bytes of a sample's states: element size x H x (A x tokens + final rows)."""
        rows = len(self.aux_layer_ids) * len(sample) + len(sample.final_rows(self.final_state))
        return DTYPE_BYTES[self.dtype] * self.hidden_size * rows


@dataclass(frozen=True)
class PlannedShard:
    """A contiguous range [start, end) of the dataset's samples that goes into one file."""

    index: int
    start: int
    end: int
    bytes: int

    @property
    def file_name(self) -> str:
        """The final name of the shard's file."""
        return f"shard-{self.index:05d}.safetensors"


def plan_shards(samples: Sequence[Sample], layout: ShardLayout, shard_bytes: int) -> list[PlannedShard]:
    """Cut the dataset, in order, into shards of at most `shard_bytes` (one sample at least)."""
    shards: list[PlannedShard] = []
    start = filled = 0
    for index, sample in enumerate(samples):
        size = layout.sample_bytes(sample)
        if filled and filled + size > shard_bytes:
            shards.append(PlannedShard(len(shards), start, index, filled))
            start, filled = index, 0
        filled += size
    if filled:
        shards.append(PlannedShard(len(shards), start, len(samples), filled))
    return shards


@dataclass(frozen=True)
class CapturedSample:
    """Hidden states of one sample.

    Attributes:
        key: key of the dataset's sample.
        input_ids: [S] int32.
        loss_mask: [S] uint8.
        aux_states: [S, A, H].
        final_states: [R, H], before the final norm.
        final_rows: [R] int64, the rows of the sample that final_states holds, increasing.
    """

    key: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_states: torch.Tensor
    final_states: torch.Tensor
    final_rows: torch.Tensor


class PackedShard:
    """The tensors of a whole shard in host memory, states still to be filled in, sample by sample.

    Args:
        samples: the samples of the shard, in order.
        layout: of the capture.
        pin_memory: page-locked memory, into which a GPU copies without waiting.
    """

    def __init__(self, samples: Sequence[Sample], layout: ShardLayout, pin_memory: bool = False) -> None:
        import numpy as np
        import torch

        self.layout = layout
        self.keys = [sample.key for sample in samples]
        rows = [sample.final_rows(layout.final_state) for sample in samples]
        self.offsets = [0, *accumulate(len(sample) for sample in samples)]
        self.final_offsets = [0, *accumulate(map(len, rows))]
        final_rows = torch.from_numpy(np.concatenate([*rows, np.empty(0, np.int64)]))
        self.final_rows = final_rows.pin_memory() if pin_memory else final_rows
        ids, masks = [s.input_ids for s in samples], [s.loss_mask for s in samples]
        self.input_ids = torch.from_numpy(np.concatenate([*ids, np.empty(0, np.int32)]).astype(np.int32))
        self.loss_mask = torch.from_numpy(np.concatenate([*masks, np.empty(0, np.uint8)]).astype(np.uint8))
        dtype = getattr(torch, layout.dtype)
        num_aux, hidden = len(layout.aux_layer_ids), layout.hidden_size
        self.aux_states = torch.empty(self.offsets[-1], num_aux, hidden, dtype=dtype, pin_memory=pin_memory)
        self.final_states = torch.empty(self.final_offsets[-1], hidden, dtype=dtype, pin_memory=pin_memory)

    @property
    def file_bytes(self) -> int:
        """Size of the file that will hold it."""
        return _file_bytes(self.shapes, self.keys, self.layout)

    @property
    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every tensor of the file."""
        return shard_shapes(len(self.keys), self.offsets[-1], self.final_offsets[-1], self.layout)

    def sample(self, index: int) -> CapturedSample:
        """Views of one sample's parts; writing into its states fills the shard."""
        rows = slice(self.offsets[index], self.offsets[index + 1])
        final = slice(self.final_offsets[index], self.final_offsets[index + 1])
        return CapturedSample(
            key=self.keys[index],
            input_ids=self.input_ids[rows],
            loss_mask=self.loss_mask[rows],
            aux_states=self.aux_states[rows],
            final_states=self.final_states[final],
            final_rows=self.final_rows[final],
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, in the order of the file; the hashes of samples are still zeros."""
        import torch

        offsets = {"sample_offsets": self.offsets, "final_offsets": self.final_offsets}
        named = {name: torch.tensor(values, dtype=torch.int64) for name, values in offsets.items()}
        named["sample_hashes"] = torch.zeros(len(self.keys), HASH_BYTES, dtype=torch.uint8)
        return {name: named[name] if name in named else getattr(self, name) for name in FILE_ORDER}


class ShardReader:
    """Reads single samples of one shard, each held against its own hash.

    Raises:
        StoreError: not a shard, or its parts contradict each other.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.index = path, ShardIndex.of_file(path)
        self.keys: list[str] = list(self.index.keys)
        self.aux_layer_ids, self.final_layer_id = self.index.aux_layer_ids, self.index.final_layer_id
        self.final_state, self.hidden_size = self.index.final_state, self.index.hidden_size
        self.dtype = self.index.dtype
        self._file = path.open("rb", buffering=0)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[CapturedSample]:
        return (self.sample(index) for index in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self.index.num_tokens

    def sample_length(self, index: int) -> int:
        """Tokens of one sample."""
        return self.index.sample_length(index)

    def sample(self, index: int) -> CapturedSample:
        """Read one sample.

        Raises:
            StoreError: it does not match its hash, or the file has become shorter.
        """
        ranges = self.index.ranges(index)
        return decode_sample(self.index, index, [self._read(each) for each in ranges if each is not None])

    def _read(self, place: ByteRange) -> memoryview:
        import numpy as np

        block = np.empty(place.length, np.uint8).data
        done = 0
        while done < place.length:
            count = os.preadv(self._file.fileno(), [block[done:]], place.start + done)
            if not count:
                raise StoreError(f"{self.path} ends before byte {place.start + place.length:,}")
            done += count
        return block


def decode_sample(index: ShardIndex, number: int, blocks: Sequence[Block]) -> CapturedSample:
    """Make a sample of its bytes, wherever they were read.

    Args:
        index: map of the shard.
        number: of the sample in the shard.
        blocks: the bytes of `index.ranges(number)` in their order (a last None apart); writable, and owned by
            the sample from now on.

    Raises:
        StoreError: they do not match the sample's hash; names shard and key.
    """
    parts = blocks[: len(HASH_ORDER)]
    check_sample(index, number, parts, blocks[-1] if len(blocks) > len(HASH_ORDER) else None)
    ids, mask, aux, final, rows = parts
    shape, dtype = (len(index.aux_layer_ids), index.hidden_size), TORCH_DTYPES[index.dtype]
    return CapturedSample(
        key=index.keys[number],
        input_ids=_tensor(ids, "int32"),
        loss_mask=_tensor(mask, "uint8"),
        aux_states=_tensor(aux, dtype).view(-1, *shape),
        final_states=_tensor(final, dtype).view(-1, index.hidden_size),
        final_rows=_tensor(rows, "int64"),
    )


def _tensor(block: Block, dtype: str) -> torch.Tensor:
    import torch

    kind = getattr(torch, dtype)
    return torch.frombuffer(block, dtype=kind) if memoryview(block).nbytes else torch.empty(0, dtype=kind)


def shard_file_bytes(samples: Sequence[Sample], layout: ShardLayout) -> int:
    """Size of the file that will hold these samples, to the byte."""
    shapes = shard_shapes(
        len(samples),
        sum(map(len, samples)),
        sum(len(sample.final_rows(layout.final_state)) for sample in samples),
        layout,
    )
    return _file_bytes(shapes, [sample.key for sample in samples], layout)


def shard_header(packed: PackedShard) -> bytes:
    """The first bytes of the file that will hold a packed shard: where each tensor lies, and what it is."""
    return _header(packed.shapes, _description(packed.keys, packed.layout))


def _file_bytes(
    shapes: dict[str, tuple[str, tuple[int, ...]]], keys: Sequence[str], layout: ShardLayout
) -> int:
    header = _header(shapes, _description(keys, layout))
    return len(header) + sum(ELEMENT_BYTES[dtype] * prod(shape) for dtype, shape in shapes.values())


def shard_shapes(
    num_samples: int, num_tokens: int, num_rows: int, layout: ShardLayout
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype, as safetensors names it, and shape of every tensor of a shard, in the order of the file."""
    states = next(name for name, dtype in TORCH_DTYPES.items() if dtype == layout.dtype)
    shapes: dict[str, tuple[int, ...]] = {
        "sample_offsets": (num_samples + 1,),
        "final_offsets": (num_samples + 1,),
        "final_rows": (num_rows,),
        "input_ids": (num_tokens,),
        "aux_states": (num_tokens, len(layout.aux_layer_ids), layout.hidden_size),
        "final_states": (num_rows, layout.hidden_size),
        "loss_mask": (num_tokens,),
        "sample_hashes": (num_samples, HASH_BYTES),
    }
    return {name: (INTEGER_DTYPES.get(name, states), shapes[name]) for name in FILE_ORDER}


def _description(keys: Sequence[str], layout: ShardLayout) -> dict[str, Any]:
    return {
        "keys": list(keys),
        "aux_layer_ids": list(layout.aux_layer_ids),
        "final_layer_id": layout.final_layer_id,
        "final_state": layout.final_state,
        "final_state_norm": "before the final norm",
    }


def _header(shapes: dict[str, tuple[str, tuple[int, ...]]], description: dict[str, Any]) -> bytes:
    """The length-prefixed JSON header of a safetensors file, padded so that the tensors start aligned."""
    header: dict[str, Any] = {"__metadata__": {SHARD_METADATA_KEY: json.dumps(description)}}
    start = 0
    for name, (dtype, shape) in shapes.items():
        end = start + ELEMENT_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
