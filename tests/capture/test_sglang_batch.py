from __future__ import annotations

import pytest

from eagle3_core.capture.sglang_batch import (
    BatchPart,
    Stitcher,
    check_rid,
    is_check,
    sample_index,
    sample_rid,
    split_batch,
)
from eagle3_core.errors import CaptureError


def test_only_our_request_ids_name_a_sample() -> None:
    assert sample_index(sample_rid(17)) == 17
    for foreign in ("HEALTH_CHECK_3", "17", "eagle3-sample-", "eagle3-sample-x", check_rid(1)):
        assert sample_index(foreign) is None
    assert is_check(["HEALTH_CHECK_3", check_rid(0)])
    assert not is_check([sample_rid(0)])


def test_rows_of_a_batch_are_split_by_request_and_foreign_ones_left_out() -> None:
    rids = [sample_rid(4), "HEALTH_CHECK_1", sample_rid(7)]
    assert split_batch(rids, [2, 1, 2], [0, 0, 3]) == [
        BatchPart(sample=4, start=0, offset=0, num_rows=2),
        BatchPart(sample=7, start=3, offset=3, num_rows=2),
    ]
    assert split_batch(["HEALTH_CHECK_1"], [5], [0]) == []


def test_a_batch_without_a_length_for_each_request_is_refused() -> None:
    with pytest.raises(CaptureError, match="2 requests, 1 lengths, 2 prefixes"):
        split_batch([sample_rid(0), sample_rid(1)], [3], [0, 0])


def test_parts_of_a_long_prompt_are_stitched_by_their_prefix() -> None:
    stitcher = Stitcher("sglang")
    first, second = BatchPart(0, 0, 0, 3), BatchPart(0, 0, 3, 2)
    assert stitcher.begin(first, "a", 5)
    assert stitcher.add(first, 5, [11, 12, 13]) is None
    assert not stitcher.begin(second, "a", 5)
    assert stitcher.add(second, 5, [14, 15]) == [11, 12, 13, 14, 15]
    assert stitcher.begin(first, "a", 5)  # a whole sample is forgotten: coming again, it is a new one


def test_rows_from_a_prefix_cache_or_beyond_the_sample_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"sample a: sglang computed rows 3 to 5 of 5 tokens.*radix cache"):
        Stitcher("sglang").begin(BatchPart(0, 0, 3, 2), "a", 5)
    with pytest.raises(CaptureError, match="computed rows 0 to 6 of 5 tokens"):
        Stitcher("sglang").begin(BatchPart(0, 0, 0, 6), "a", 5)
