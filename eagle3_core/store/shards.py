"""Shards of captured hidden states.

Legend: S packed tokens, A auxiliary layers, H hidden size, R rows with a final state, n samples.

A shard is one safetensors file:

    aux_states      [S, A, H]  states by auxiliary capture id, in the order of the metadata
    final_states    [R, H]     states before the final norm, for the rows that `final_rows` names
    final_rows      [R]        int64 row inside its sample
    input_ids       [S]        int32
    loss_mask       [S]        uint8
    sample_offsets  [n + 1]    int64, rows of sample i are [offsets[i], offsets[i+1])
    final_offsets   [n + 1]    int64, the same for final_states

Keys, capture ids and the final-state policy are in the metadata. Reading needs torch for bf16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eagle3_core.artifacts import FileEntry
from eagle3_core.errors import StoreError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import atomic_file, file_entry

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHARD_METADATA_KEY = "eagle3_shard"


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


def write_shard(path: Path, samples: Sequence[CapturedSample], layout: ShardLayout) -> FileEntry:
    """Write a shard under its final name and return its manifest entry.

    Raises:
        StoreError: a sample's tensors do not have the layout's shapes.
    """
    import torch
    from safetensors.torch import save

    for sample in samples:
        _check_shapes(sample, layout)
    tensors = {
        "aux_states": torch.cat([s.aux_states for s in samples]),
        "final_states": torch.cat([s.final_states for s in samples]),
        "final_rows": torch.cat([s.final_rows for s in samples]),
        "input_ids": torch.cat([s.input_ids for s in samples]).to(torch.int32),
        "loss_mask": torch.cat([s.loss_mask for s in samples]).to(torch.uint8),
        "sample_offsets": _offsets([len(s.input_ids) for s in samples]),
        "final_offsets": _offsets([len(s.final_rows) for s in samples]),
    }
    description = {
        "keys": [s.key for s in samples],
        "aux_layer_ids": list(layout.aux_layer_ids),
        "final_layer_id": layout.final_layer_id,
        "final_state": layout.final_state,
        "final_state_norm": "before the final norm",
    }
    with atomic_file(path) as handle:
        handle.write(save(tensors, metadata={SHARD_METADATA_KEY: json.dumps(description)}))
    return file_entry(
        path.parent,
        path,
        num_samples=len(samples),
        num_tokens=len(tensors["input_ids"]),
        num_final_rows=len(tensors["final_rows"]),
    )


class ShardReader:
    """Memory-maps one shard; a sample is read without the rest.

    Raises:
        StoreError: not a shard, or its parts contradict each other.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file = safe_open(str(path), framework="pt")
            description = json.loads((self._file.metadata() or {})[SHARD_METADATA_KEY])
            self.keys: list[str] = description["keys"]
            self.aux_layer_ids = tuple(description["aux_layer_ids"])
            self.final_layer_id: int = description["final_layer_id"]
            self._offsets = self._file.get_tensor("sample_offsets").tolist()
            self._final_offsets = self._file.get_tensor("final_offsets").tolist()
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise StoreError(f"{path} is not a shard of hidden states ({error})") from error
        shapes = {name: self._file.get_slice(name).get_shape() for name in self._file.keys()}  # noqa: SIM118
        consistent = (
            len(self._offsets) == len(self._final_offsets) == len(self.keys) + 1
            and shapes["aux_states"][0] == shapes["input_ids"][0] == shapes["loss_mask"][0]
            and self._offsets[-1] == shapes["input_ids"][0]
            and self._final_offsets[-1] == shapes["final_states"][0] == shapes["final_rows"][0]
            and shapes["aux_states"][1] == len(self.aux_layer_ids)
        )
        if not consistent:
            raise StoreError(f"{path}: tensors and offsets contradict each other: {shapes}")

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[CapturedSample]:
        return (self.sample(index) for index in range(len(self)))

    def sample(self, index: int) -> CapturedSample:
        """Read one sample."""
        rows = slice(self._offsets[index], self._offsets[index + 1])
        final = slice(self._final_offsets[index], self._final_offsets[index + 1])
        return CapturedSample(
            key=self.keys[index],
            input_ids=self._file.get_slice("input_ids")[rows],
            loss_mask=self._file.get_slice("loss_mask")[rows],
            aux_states=self._file.get_slice("aux_states")[rows],
            final_states=self._file.get_slice("final_states")[final],
            final_rows=self._file.get_slice("final_rows")[final],
        )


def _check_shapes(sample: CapturedSample, layout: ShardLayout) -> None:
    tokens, rows = len(sample.input_ids), len(sample.final_rows)
    expected = {
        "loss_mask": (tokens,),
        "aux_states": (tokens, len(layout.aux_layer_ids), layout.hidden_size),
        "final_states": (rows, layout.hidden_size),
    }
    for name, shape in expected.items():
        found = tuple(getattr(sample, name).shape)
        if found != shape:
            raise StoreError(f"sample {sample.key}: {name} has shape {found}", expected=str(shape))


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    import torch

    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
