"""The tokenised dataset: one Parquet file of token ids and loss masks; readable without torch.

The loss mask l marks tokens that the target generated: l[j] = 1 where token j is part of an answer or is its
end-of-turn token. Five tokens of a sample, prompt of three:

    j            0    1    2    3    4
    input_ids    p    p    p    a    end
    loss_mask    0    0    0    1    1
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_core.errors import DataError

DATASET_FILE = "samples.parquet"
Split = Literal["train", "heldout"]
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("kind", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("prompt_length", pa.int32()),
        ("finish_reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation.

    Attributes:
        key: stable identity of the conversation.
        kind: kind of prompt, e.g. `code`.
        split: `train` or `heldout`.
        input_ids: [S] int32 token ids.
        loss_mask: [S] uint8, 1 on generated tokens.
        prompt_length: tokens before the last answer; a serving engine gets `input_ids[:prompt_length]`.
        finish_reason: why the last answer ended: `stop` or `length`.
    """

    key: str
    kind: str
    split: Split
    input_ids: np.ndarray
    loss_mask: np.ndarray
    prompt_length: int
    finish_reason: str

    def __post_init__(self) -> None:
        if self.input_ids.shape != self.loss_mask.shape or self.input_ids.ndim != 1:
            raise DataError(
                f"sample {self.key} has {self.input_ids.shape} ids and {self.loss_mask.shape} mask entries"
            )

    def __len__(self) -> int:
        return len(self.input_ids)

    def final_rows(self, policy: Literal["loss_rows", "all"]) -> np.ndarray:
        """Rows whose final-layer state is stored: j >= 1 with l[j] = 1 (what a loss reads), or all."""
        if policy == "all":
            return np.arange(len(self))
        return 1 + np.flatnonzero(self.loss_mask[1:])


def write_dataset(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples to a Parquet file, in order."""
    columns = {name: [getattr(sample, name) for sample in samples] for name in SCHEMA.names}
    pq.write_table(pa.Table.from_pydict(columns, schema=SCHEMA), path, compression="zstd")


def read_dataset(folder: Path) -> list[Sample]:
    """All samples of a dataset artifact, in order.

    Raises:
        DataError: missing or not a dataset.
    """
    path = folder / DATASET_FILE
    try:
        table = pq.read_table(path, schema=SCHEMA)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"cannot read the dataset {path} ({error})") from error
    rows = zip(*(table.column(name).to_pylist() for name in SCHEMA.names), strict=True)
    return [
        Sample(key, kind, split, np.array(ids, np.int32), np.array(mask, np.uint8), prompt_length, reason)
        for key, kind, split, ids, mask, prompt_length, reason in rows
    ]


def content_hash(samples: Sequence[Sample]) -> str:
    """Hash of keys, splits, ids and masks in order: what determines a capture."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.key}\0{sample.split}\0{len(sample)}\0".encode())
        digest.update(sample.input_ids.astype("<i4").tobytes())
        digest.update(sample.loss_mask.astype("u1").tobytes())
    return digest.hexdigest()[:32]


def sample_counts(samples: Sequence[Sample]) -> dict[str, int]:
    """Samples by split and their tokens, as a dataset's manifest has them."""
    num_train = sum(sample.split == "train" for sample in samples)
    return {
        "num_train": num_train,
        "num_heldout": len(samples) - num_train,
        "num_tokens": sum(map(len, samples)),
        "num_trainable_tokens": int(sum(sample.loss_mask.sum() for sample in samples)),
    }


def benchmark_samples(samples: Sequence[Sample], num_prompts: int) -> list[Sample]:
    """The held-out samples that the benchmark decodes: the first of each kind in turn, in dataset order."""
    by_kind: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.split == "heldout":
            by_kind.setdefault(sample.kind, []).append(sample)
    depth = max((len(group) for group in by_kind.values()), default=0)
    turns = [group[i] for i in range(depth) for group in by_kind.values() if i < len(group)]
    return turns[:num_prompts]
