"""Labels of a capture: what the target itself says at every row that a loss reads.

Legend: m samples of a shard, n labels of a sample (its tokens j >= 1 with l[j] = 1), N labels of a shard.

Beside each shard lies one safetensors file of the same name in another artifact, since what it says depends
on the draft vocabulary too:

    offsets        [m + 1]  int64, labels of sample i are [offsets[i], offsets[i + 1])
    argmax         [N]      int32, the target's greedy choice over its FULL vocabulary
    share          [N]      fp32, the target's probability of all tokens of the draft vocabulary together
    sample_hashes  [m, 16]  uint8, xxh3_128 of a sample's key, argmax and share

A file is small, about 8 bytes a label, so it is read once and stays in memory. Its manifest entry names the
hash of the shard that it was made from: labels of a shard that was made again are outdated.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from eagle3_core.artifacts import FileEntry, Manifest
from eagle3_core.errors import StoreError
from eagle3_core.store.layout import HASH_BYTES, sample_hash
from eagle3_core.store.local import LocalStore
from eagle3_core.store.samples import SamplePlace

MADE_FROM = "shard_xxh3_128"
"""Fact of a file's entry: hash of the shard that its labels belong to."""
REMEDY = "run the stage train again: only this file is made anew"


@dataclass(frozen=True)
class SampleLabels:
    """Labels of one sample.

    Attributes:
        argmax: [n] int32 target ids.
        share: [n] fp32, in [0, 1].
    """

    argmax: np.ndarray
    share: np.ndarray

    def __len__(self) -> int:
        return len(self.argmax)


def encode_labels(keys: Sequence[str], labels: Sequence[SampleLabels]) -> bytes:
    """The file of a shard's labels; `keys` are those of its samples, in order."""
    from safetensors.numpy import save

    hashes = [_hash(key, each) for key, each in zip(keys, labels, strict=True)]
    return save(
        {
            "offsets": np.cumsum([0, *map(len, labels)]).astype(np.int64),
            "argmax": np.concatenate([np.empty(0, np.int32), *(each.argmax for each in labels)]),
            "share": np.concatenate([np.empty(0, np.float32), *(each.share for each in labels)]),
            "sample_hashes": np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES),
        }
    )


def outdated(files: Mapping[str, FileEntry], capture: Manifest, shards: Sequence[str]) -> list[str]:
    """Names of shards whose labels are not there, or belong to an earlier making of the shard."""
    wanted = {entry.path: entry.xxh3_128 for entry in capture.files}
    return [
        name for name in shards if name not in files or files[name].facts.get(MADE_FROM) != wanted.get(name)
    ]


class Labels(Protocol):
    """Labels by sample."""

    def sample(self, place: SamplePlace, key: str) -> SampleLabels:
        """The labels of one sample."""


class LabelSource:
    """The labels of one capture; safe to use from several threads.

    Args:
        store: any store.
        manifest: of complete labels.
    """

    def __init__(self, store: LocalStore, manifest: Manifest) -> None:
        self._store, self._manifest = store, manifest
        self._files: dict[str, dict[str, np.ndarray]] = {}
        self._lock = threading.Lock()

    def sample(self, place: SamplePlace, key: str) -> SampleLabels:
        """The labels of one sample, proven by its hash.

        Raises:
            StoreError: they cannot be read, are damaged, or are another sample's; names file and key.
        """
        tensors = self._file(place.shard)
        if place.number + 1 >= len(tensors["offsets"]):
            raise StoreError(
                f"{self._name(place.shard)} has no labels of its shard's sample {place.number}", remedy=REMEDY
            )
        start, end = tensors["offsets"][place.number : place.number + 2]
        found = SampleLabels(tensors["argmax"][start:end], tensors["share"][start:end])
        if _hash(key, found) != tensors["sample_hashes"][place.number].tobytes():
            raise StoreError(
                f"{self._name(place.shard)}: the labels of {key} do not match their hash", remedy=REMEDY
            )
        return found

    def _file(self, name: str) -> dict[str, np.ndarray]:
        with self._lock:
            if name not in self._files:
                self._files[name] = self._read(name)
            return self._files[name]

    def _read(self, name: str) -> dict[str, np.ndarray]:
        from safetensors import SafetensorError
        from safetensors.numpy import load

        entry = self._manifest.file(name)
        if entry is None:
            raise StoreError(f"{self._manifest.ref} has no labels of the shard {name}", remedy=REMEDY)
        content = self._store.read_range(self._manifest.ref, name, 0, entry.bytes)
        if xxhash.xxh3_128_hexdigest(content) != entry.xxh3_128:
            raise StoreError(f"{self._name(name)} does not match its hash", remedy=REMEDY)
        try:
            return load(content)
        except SafetensorError as error:
            raise StoreError(f"{self._name(name)} holds no labels ({error})", remedy=REMEDY) from error

    def _name(self, shard: str) -> str:
        return f"{self._manifest.ref}/{shard}"


def _hash(key: str, labels: SampleLabels) -> bytes:
    return sample_hash([key.encode(), labels.argmax.tobytes(), labels.share.tobytes()])
