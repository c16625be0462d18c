"""The draft vocabulary: the most frequent answer tokens of the target's.

Legend: V target vocabulary (rows of its embedding), D draft vocabulary.

`d2t` holds offsets, `target = draft + d2t[draft]`; `t2d` says which target ids the draft has. Five target
ids of which the draft has 1 and 4:

    draft id    0  1          target id  0  1  2  3  4
    target id   1  4          t2d        0  1  0  0  1
    d2t         1  3
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3_core.errors import DataError
from eagle3_core.store.dataset import Sample, Split
from eagle3_core.store.files import write_atomic

VOCABULARY_FILE = "vocabulary.safetensors"


@dataclass(frozen=True)
class DraftVocabulary:
    """A mapping between draft and target ids.

    Attributes:
        d2t: [D] int64, offset from draft id to target id.
        t2d: [V] bool, whether the draft has the target id.
    """

    d2t: np.ndarray
    t2d: np.ndarray

    def __post_init__(self) -> None:
        targets = self.draft_to_target
        fits = targets.ndim == self.t2d.ndim == 1 and len(targets) == np.count_nonzero(self.t2d)
        if not (fits and np.array_equal(targets, np.flatnonzero(self.t2d))):
            raise DataError(
                f"d2t {self.d2t.shape} and t2d {self.t2d.shape} do not describe one mapping",
                remedy="run the stage prepare again",
            )

    @property
    def draft_to_target(self) -> np.ndarray:
        """[D] int64 target ids, increasing."""
        return np.arange(len(self.d2t)) + self.d2t

    @property
    def is_identity(self) -> bool:
        """Whether the draft has the whole vocabulary; engines then get no mapping."""
        return bool(self.t2d.all())

    def coverage(self, counts: np.ndarray) -> float:
        """Share of counted tokens ([V] int64) that the draft has; 1 if nothing was counted."""
        total = int(counts.sum())
        return float(counts[self.t2d].sum() / total) if total else 1.0


def answer_counts(samples: Iterable[Sample], target_size: int, split: Split) -> np.ndarray:
    """[V] int64: how often each target id occurs as an answer token of a split."""
    counts = np.zeros(target_size, np.int64)
    for sample in samples:
        if sample.split == split:
            counts += np.bincount(sample.input_ids[sample.loss_mask == 1], minlength=target_size)
    return counts


def build_vocabulary(
    counts: np.ndarray, draft_size: int, tokenizer_size: int, required: Iterable[int] = ()
) -> DraftVocabulary:
    """The mapping with the `required` ids (end of turn) and the most frequent ones.

    Ties and ids that never occurred are taken in increasing order. Rows of the embedding that the tokenizer
    has no token for are part of no mapping but the identity, D = V.

    Args:
        counts: [V] int64 occurrences in answers.
        draft_size: D.
        tokenizer_size: ids from here on have no token.
        required: target ids that the draft must have.

    Raises:
        DataError: D larger than V or than the tokenizer, or too small for `required`.
    """
    target_size = len(counts)
    if draft_size == target_size:
        return DraftVocabulary(np.zeros(draft_size, np.int64), np.ones(target_size, bool))
    num_real = min(tokenizer_size, target_size)
    must = sorted({token for token in required if 0 <= token < num_real})
    if not max(1, len(must)) <= draft_size <= num_real:
        raise DataError(
            f"draft.vocab_size is {draft_size:,}",
            expected=f"{max(1, len(must))} to {num_real:,} (ids with a token) or all {target_size:,} rows",
        )
    rank = counts[:num_real].astype(np.int64)
    rank[must] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-rank, kind="stable")[:draft_size])
    t2d = np.zeros(target_size, bool)
    t2d[chosen] = True
    return DraftVocabulary(chosen - np.arange(draft_size), t2d)


def save_vocabulary(vocabulary: DraftVocabulary, folder: Path) -> Path:
    """Write the mapping to a folder and return the file."""
    from safetensors.numpy import save

    path = folder / VOCABULARY_FILE
    write_atomic(path, save({"d2t": vocabulary.d2t.astype(np.int64), "t2d": vocabulary.t2d}))
    return path


def load_vocabulary(folder: Path) -> DraftVocabulary:
    """Read the mapping of a vocabulary artifact.

    Raises:
        DataError: missing, damaged or inconsistent.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / VOCABULARY_FILE
    try:
        tensors = load_file(path)
        return DraftVocabulary(tensors["d2t"], tensors["t2d"])
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(
            f"cannot read the vocabulary {path} ({error!r})", remedy="run the stage prepare again"
        ) from error
