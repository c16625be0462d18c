"""What every foreign folder of hidden states is for us: rows of samples, read one at a time.

Legend: S tokens of a sample, L stored layers (the auxiliary ones, then the final one), H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from eagle3_core.errors import DataError
from eagle3_core.store.dataset import Sample, Split

if TYPE_CHECKING:
    import torch

MAX_NAMED = 5


@dataclass(frozen=True)
class ForeignText:
    """One sample's tokens as a foreign folder has them.

    Attributes:
        source: the file it comes from, for messages.
        input_ids: [S].
        loss_mask: [S].
        key: only where the folder was exported by this project.
        split: as key.
    """

    source: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    key: str | None = None
    split: Split | None = None


class ForeignFolder(Protocol):
    """A folder that can be imported."""

    @property
    def num_samples(self) -> int:
        """Its rows."""
        ...

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        """The stored layers in the format's own counting, where the folder says them."""
        ...

    def source(self, row: int) -> str:
        """The file of a row, for messages."""
        ...

    def text(self, row: int) -> ForeignText:
        """Tokens and loss mask of a row."""
        ...

    def states(self, row: int) -> torch.Tensor:
        """States [S, L, H] of a row, the final layer last."""
        ...


class FolderWriter(Protocol):
    """Writes a folder in a foreign format."""

    def add(self, row: int, sample: Sample, states: torch.Tensor) -> None:
        """Write one row with states [S, L, H], the final layer last."""
        ...

    def finish(self) -> None:
        """Write what belongs to all rows."""
        ...


def numbered_files(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder that carry a row number, in its order.

    Args:
        folder: of the files.
        pattern: a regular expression over the whole name, with the number as its group.

    Raises:
        DataError: none, two for one row, or rows that are missing.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*")) if folder.is_dir() else ():
        match = re.fullmatch(pattern, path.name)
        if match is None:
            continue
        row = int(match.group(1))
        if row in found:
            raise DataError(
                f"{path} and {found[row].name} are both row {row}", expected="one file for each row"
            )
        found[row] = path
    if not found:
        raise DataError(f"{folder} has no file named like {pattern}", remedy="check the folder and --format")
    missing = sorted(set(range(max(found) + 1)) - found.keys())
    if missing:
        raise DataError(
            f"{folder} lacks {len(missing)} of {max(found) + 1} rows: {named(missing)}",
            expected="files numbered from 0 without gaps",
            remedy="generate them, or number the files anew",
        )
    return [found[row] for row in sorted(found)]


def named(values: Iterable[object]) -> str:
    """The first few of many, for a message."""
    shown = [str(value) for value in values]
    return ", ".join(shown[:MAX_NAMED]) + ("" if len(shown) <= MAX_NAMED else ", ...")


def check_text(text: ForeignText, vocab_size: int) -> None:
    """Refuse tokens that cannot be trained on.

    Raises:
        DataError: names the file.
    """
    ids, mask = text.input_ids, text.loss_mask
    if ids.ndim != 1 or not len(ids) or ids.shape != mask.shape:
        raise DataError(
            f"{text.source} has {list(ids.shape)} token ids and a loss mask of {list(mask.shape)}",
            expected="as many of both",
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(
            f"{text.source} has token id {wrong:,}", expected=f"ids below the target's {vocab_size:,}"
        )
    if not np.isin(mask, (0, 1)).all():
        raise DataError(f"{text.source} has a loss mask with other values than 0 and 1")
