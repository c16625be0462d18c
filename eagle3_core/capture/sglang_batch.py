"""Which rows of an SGLang batch belong to which sample; imports neither torch nor SGLang.

A batch is the rows of its requests, one request after the other, perhaps with padding at the end. A long
prompt comes in several batches; the prefix length says where its rows begin. Three requests, of which the
middle one is somebody else's, and one row of padding:

    requests        sample 4   health check   sample 7
    prefix lengths      0            0            3        sample 7 had three rows in an earlier batch
    new rows            2            1            2
    rows            0  1     2                 3  4     5
                    rows 0, 1 of sample 4      rows 3, 4 of sample 7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_core.errors import CaptureError

SAMPLE_PREFIX = "eagle3-sample-"
CHECK_PREFIX = "eagle3-check-"


@dataclass(frozen=True)
class BatchPart:
    """Rows [start, start + num_rows) of a batch are rows [offset, offset + num_rows) of a sample.

    Attributes:
        sample: index of the sample in the dataset.
        start: first row in the batch.
        offset: first row in the sample.
        num_rows: number of rows.
    """

    sample: int
    start: int
    offset: int
    num_rows: int


def sample_rid(index: int) -> str:
    """The request id of a sample."""
    return f"{SAMPLE_PREFIX}{index}"


def check_rid(number: int) -> str:
    """The request id of a check: a few tokens that show whether all hooks see their layers."""
    return f"{CHECK_PREFIX}{number}"


def sample_index(rid: str) -> int | None:
    """The sample that a request is for, or None for anybody else's."""
    number = rid.removeprefix(SAMPLE_PREFIX)
    return int(number) if rid.startswith(SAMPLE_PREFIX) and number.isdecimal() else None


def split_batch(rids: Sequence[str], num_rows: Sequence[int], offsets: Sequence[int]) -> list[BatchPart]:
    """The parts of a batch that belong to samples; other requests and padding are left out.

    Args:
        rids: request ids in the order of the rows.
        num_rows: new rows of each request.
        offsets: rows that each request had before.

    Raises:
        CaptureError: the lists do not have one entry a request.
    """
    if not len(rids) == len(num_rows) == len(offsets):
        raise CaptureError(
            f"an SGLang batch has {len(rids)} requests, {len(num_rows)} lengths, {len(offsets)} prefixes",
            expected="as many of each",
            remedy="this SGLang release is not supported",
        )
    parts, start = [], 0
    for rid, count, offset in zip(rids, num_rows, offsets, strict=True):
        index = sample_index(rid)
        if index is not None and count > 0:
            parts.append(BatchPart(index, start, int(offset), int(count)))
        start += count
    return parts


def is_check(rids: Sequence[str]) -> bool:
    """Whether a batch holds a check."""
    return any(rid.startswith(CHECK_PREFIX) for rid in rids)


class Stitcher:
    """Follows the parts of each sample and tells when one is whole."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._ids: dict[int, list[int]] = {}

    def begin(self, part: BatchPart, key: str, length: int) -> bool:
        """Whether this part is its sample's first.

        Args:
            part: where the part lies.
            key: key of the sample, for messages.
            length: tokens that were sent.

        Raises:
            CaptureError: rows before these are missing, or there are more than tokens were sent.
        """
        known = len(self._ids.get(part.sample, ()))
        end = part.offset + part.num_rows
        if part.offset != known or end > length:
            raise CaptureError(
                f"sample {key}: {self._engine} computed rows {part.offset} to {end} of {length} tokens",
                expected=f"rows from {known}, each once",
                remedy="turn the radix cache off and capture again",
            )
        is_new = part.sample not in self._ids
        self._ids.setdefault(part.sample, [])
        return is_new

    def add(self, part: BatchPart, length: int, token_ids: Sequence[int]) -> list[int] | None:
        """Take the ids that the engine ran for a part; returns all ids of the sample when it is whole."""
        ids = self._ids[part.sample]
        ids.extend(token_ids)
        return self._ids.pop(part.sample) if len(ids) >= length else None
