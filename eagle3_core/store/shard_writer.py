"""Writes shards of captured hidden states; `shards` says what they hold. Needs torch.

Legend: S tokens of a sample, A auxiliary layers, H hidden size, R rows with a final state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_core.artifacts import FileEntry
from eagle3_core.errors import StoreError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import HashingWriter, atomic_file
from eagle3_core.store.layout import FILE_ORDER, HASH_ORDER, sample_hash
from eagle3_core.store.shards import CapturedSample, PackedShard, ShardLayout, shard_header

if TYPE_CHECKING:
    import torch


class ShardFile:
    """Writes and hashes a packed shard while its samples arrive; the bytes are touched once.

    The file appears under its final name when `finish` returns. The parts are written in the order of the
    file, so a caller hands over samples in order, one thread at a time, and leaves them as they are.
    """

    def __init__(self, path: Path, packed: PackedShard, with_sha256: bool = False) -> None:
        self.path, self._packed = path, packed
        self._tensors = packed.tensors()
        self._exit = contextlib.ExitStack()
        self._writer = HashingWriter(self._exit.enter_context(atomic_file(path)), with_sha256)
        self._exit.callback(self._writer.close)
        try:
            self._writer.write(shard_header(packed))
            for name in FILE_ORDER[: FILE_ORDER.index("aux_states")]:
                self._write(self._tensors[name])
        except BaseException as error:
            self.abandon(error)
            raise

    def write_sample(self, index: int) -> None:
        """Write the auxiliary states of a sample, of which all earlier ones are written."""
        self._writer.beside(self._hash_sample, index)
        self._write(self._packed.sample(index).aux_states)

    def finish(self) -> FileEntry:
        """Write the rest, give the file its name and return its manifest entry."""
        for name in FILE_ORDER[FILE_ORDER.index("aux_states") + 1 : -1]:
            self._write(self._tensors[name])
        self._writer.wait()
        self._write(self._tensors["sample_hashes"])
        digest, sha256 = self._writer.hexdigest(), self._writer.sha256()
        self._exit.close()
        packed = self._packed
        return FileEntry(
            path=self.path.name,
            bytes=self._writer.bytes,
            xxh3_128=digest,
            sha256=sha256,
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

    def _hash_sample(self, index: int) -> None:
        sample = self._packed.sample(index)
        digest = sample_hash(_raw_bytes(getattr(sample, name)) for name in HASH_ORDER)
        _raw_bytes(self._tensors["sample_hashes"][index])[:] = digest

    def _write(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._writer.write(_raw_bytes(tensor))


def write_packed_shard(path: Path, packed: PackedShard, with_sha256: bool = False) -> FileEntry:
    """Write a filled shard under its final name and return its manifest entry."""
    file = ShardFile(path, packed, with_sha256)
    try:
        for index in range(len(packed.keys)):
            file.write_sample(index)
        return file.finish()
    except BaseException as error:
        file.abandon(error)
        raise


def write_shard(
    path: Path, samples: Sequence[CapturedSample], layout: ShardLayout, with_sha256: bool = False
) -> FileEntry:
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
    return write_packed_shard(path, packed, with_sha256)


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
