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

Keys, capture ids and the final-state policy are in the metadata. Two samples of three and two tokens, final
states of the rows that a loss reads:

    input_ids        a0 a1 a2 b0 b1          sample_offsets  0 3 5
    loss_mask         0  0  1  0  1          final_rows      2 1
    final_states           f2    f1          final_offsets   0 1 2

Planning needs no torch; reading and writing does (for bf16).
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3_core.artifacts import FileEntry
from eagle3_core.errors import StoreError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import HashingWriter, atomic_file

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHARD_METADATA_KEY = "eagle3_shard"
FILE_ORDER = (
    "sample_offsets", "final_offsets", "final_rows", "input_ids", "aux_states", "final_states", "loss_mask",
)  # fmt: skip
"""Order of the tensors in a file: each starts at a multiple of its element size."""


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
        """All tensors by name, in the order of the file."""
        import torch

        offsets = {"sample_offsets": self.offsets, "final_offsets": self.final_offsets}
        named = {name: torch.tensor(values, dtype=torch.int64) for name, values in offsets.items()}
        return {name: named[name] if name in named else getattr(self, name) for name in FILE_ORDER}


class ShardFile:
    """Writes and hashes a packed shard while its samples arrive; the bytes are touched once.

    The file appears under its final name when `finish` returns. The parts are written in the order of the
    file, so a caller hands over samples in order; one thread at a time.
    """

    def __init__(self, path: Path, packed: PackedShard) -> None:
        self.path, self._packed = path, packed
        self._tensors = packed.tensors()
        self._exit = contextlib.ExitStack()
        self._writer = HashingWriter(self._exit.enter_context(atomic_file(path)))
        try:
            self._writer.write(_header(self._tensors, _description(packed)))
            for name in FILE_ORDER[: FILE_ORDER.index("aux_states")]:
                self._write(self._tensors[name])
        except BaseException as error:
            self.abandon(error)
            raise

    def write_sample(self, index: int) -> None:
        """Write the auxiliary states of a sample, of which all earlier ones are written."""
        self._write(self._packed.sample(index).aux_states)

    def finish(self) -> FileEntry:
        """Write the rest, give the file its name and return its manifest entry."""
        for name in FILE_ORDER[FILE_ORDER.index("aux_states") + 1 :]:
            self._write(self._tensors[name])
        self._exit.close()
        packed = self._packed
        return FileEntry(
            path=self.path.name,
            bytes=self._writer.bytes,
            xxh3_128=self._writer.hexdigest(),
            facts={
                "num_samples": len(packed.keys),
                "num_tokens": packed.offsets[-1],
                "num_final_rows": packed.final_offsets[-1],
                "state_bytes": packed.aux_states.nbytes + packed.final_states.nbytes,
            },
        )

    def abandon(self, error: BaseException) -> None:
        """Remove what was written of a shard that will not be finished."""
        with contextlib.suppress(BaseException):
            self._exit.__exit__(type(error), error, error.__traceback__)

    def _write(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._writer.write(_raw_bytes(tensor))


def write_packed_shard(path: Path, packed: PackedShard) -> FileEntry:
    """Write a filled shard under its final name and return its manifest entry."""
    file = ShardFile(path, packed)
    try:
        for index in range(len(packed.keys)):
            file.write_sample(index)
        return file.finish()
    except BaseException as error:
        file.abandon(error)
        raise


def write_shard(path: Path, samples: Sequence[CapturedSample], layout: ShardLayout) -> FileEntry:
    """Write captured samples as a shard under its final name and return its manifest entry.

    Raises:
        StoreError: a sample's tensors do not have the layout's shapes or dtype, or its rows are not those
            that the layout's final-state policy asks for.
    """
    for sample in samples:
        _check_shapes(sample, layout)
    plain = [_dataset_sample(sample) for sample in samples]
    packed = PackedShard(plain, layout)
    for index, sample in enumerate(samples):
        place = packed.sample(index)
        if place.final_rows.tolist() != sample.final_rows.tolist():
            raise StoreError(
                f"sample {sample.key} has final states of {len(sample.final_rows)} rows",
                expected=f"the {len(place.final_rows)} rows of the policy {layout.final_state}",
            )
        place.aux_states.copy_(sample.aux_states)
        place.final_states.copy_(sample.final_states)
    return write_packed_shard(path, packed)


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
            self.final_state: str = description["final_state"]
            self._offsets = self._file.get_tensor("sample_offsets").tolist()
            self._final_offsets = self._file.get_tensor("final_offsets").tolist()
            shapes = {name: self._file.get_slice(name).get_shape() for name in FILE_ORDER}
            self.dtype: str = self._file.get_slice("aux_states").get_dtype()
            contradictions = self._contradictions(shapes)
        except (OSError, KeyError, IndexError, TypeError, ValueError, SafetensorError) as error:
            raise StoreError(f"{path} is not a shard of hidden states ({error})") from error
        if contradictions:
            raise StoreError(f"{path}: tensors and offsets contradict each other: {contradictions}")
        self.hidden_size: int = shapes["aux_states"][2]

    def _contradictions(self, shapes: dict[str, list[int]]) -> str:
        tokens, rows = shapes["input_ids"][0], shapes["final_rows"][0]
        expected = {
            "sample_offsets": [len(self.keys) + 1],
            "final_offsets": [len(self.keys) + 1],
            "loss_mask": [tokens],
            "aux_states": [tokens, len(self.aux_layer_ids), *shapes["aux_states"][2:3]],
            "final_states": [rows, *shapes["aux_states"][2:3]],
        }
        found = [
            f"{name} {shapes[name]} instead of {want}"
            for name, want in expected.items()
            if shapes[name] != want
        ]
        for name, offsets, end in (
            ("sample_offsets", self._offsets, tokens),
            ("final_offsets", self._final_offsets, rows),
        ):
            if offsets != sorted(offsets) or offsets[:1] != [0] or offsets[-1:] != [end]:
                found.append(f"{name} do not run from 0 to {end}")
        return "; ".join(found)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[CapturedSample]:
        return (self.sample(index) for index in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return self._offsets[-1]

    def sample_length(self, index: int) -> int:
        """Tokens of one sample."""
        return self._offsets[index + 1] - self._offsets[index]

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


def _description(packed: PackedShard) -> dict[str, Any]:
    return {
        "keys": packed.keys,
        "aux_layer_ids": list(packed.layout.aux_layer_ids),
        "final_layer_id": packed.layout.final_layer_id,
        "final_state": packed.layout.final_state,
        "final_state_norm": "before the final norm",
    }


def _header(tensors: dict[str, torch.Tensor], description: dict[str, Any]) -> bytes:
    """The length-prefixed JSON header of a safetensors file, padded so that the tensors start aligned."""
    names = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32", "torch.int64": "I64",
             "torch.int32": "I32", "torch.uint8": "U8"}  # fmt: skip
    header: dict[str, Any] = {"__metadata__": {SHARD_METADATA_KEY: json.dumps(description)}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        shape, dtype = list(tensor.shape), names[str(tensor.dtype)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _dataset_sample(sample: CapturedSample) -> Sample:
    ids, mask = sample.input_ids.numpy(), sample.loss_mask.numpy()
    return Sample(sample.key, "", "train", ids, mask, prompt_length=0, finish_reason="")


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
    for name in ("aux_states", "final_states"):
        dtype = str(getattr(sample, name).dtype).removeprefix("torch.")
        if dtype != layout.dtype:
            raise StoreError(f"sample {sample.key}: {name} is {dtype}", expected=layout.dtype)
