"""The layer-id convention."""

from __future__ import annotations

import pytest

from eagle3_core.errors import TargetError
from eagle3_core.target.layers import (
    check_capture_ids,
    default_aux_layer_ids,
    final_layer_id,
    from_layer_outputs,
    resolve_aux_layer_ids,
    source_layer,
    to_layer_outputs,
)


@pytest.mark.parametrize(
    ("num_layers", "ids"), [(8, (2, 4, 5)), (30, (2, 15, 27)), (32, (2, 16, 29)), (61, (2, 30, 58))]
)
def test_default_ids_are_low_middle_and_high(num_layers: int, ids: tuple[int, ...]) -> None:
    assert default_aux_layer_ids(num_layers) == resolve_aux_layer_ids(None, num_layers) == ids
    assert final_layer_id(num_layers) == num_layers


def test_a_state_is_the_output_of_the_layer_before_or_of_the_embedding() -> None:
    assert [source_layer(k) for k in (0, 1, 4)] == [None, 0, 3]


@pytest.mark.parametrize("num_layers", [1, 3, 5, 6])
def test_a_target_too_small_for_the_default_says_what_to_set(num_layers: int) -> None:
    with pytest.raises(TargetError, match=r"target\.aux_layer_ids"):
        default_aux_layer_ids(num_layers)


@pytest.mark.parametrize(
    "ids", [(2, 4, 99), (2, 2, 4), (4, 2, 5), (2, 4), (2, 4, 8), (-1, 2, 4), (1, 2, 3, 4)]
)
def test_ids_that_cannot_be_captured_are_refused_up_front(ids: tuple[int, ...]) -> None:
    with pytest.raises(TargetError, match=r"cannot be captured.*0 to 7"):
        resolve_aux_layer_ids(ids, 8)


def test_what_is_wrong_with_ids_is_said() -> None:
    with pytest.raises(TargetError, match=r"99 is no layer, 2 is there 2 times, not increasing, 4 ids\)"):
        resolve_aux_layer_ids([2, 99, 2, 4], 8)


def test_explicit_ids_are_kept_and_zero_is_the_embedding_output() -> None:
    assert resolve_aux_layer_ids([0, 1, 3], 4) == (0, 1, 3)


def test_layers_counted_after_are_translated_both_ways() -> None:
    assert from_layer_outputs((2, 30, 58, 60), 61) == (3, 31, 59, 61)
    assert to_layer_outputs((3, 31, 59, 61)) == (2, 30, 58, 60)


def test_ids_that_the_target_or_the_format_does_not_have_are_refused() -> None:
    with pytest.raises(TargetError, match="no layer 61; expected layers from 0 to 60"):
        from_layer_outputs((2, 61), 61)
    with pytest.raises(TargetError, match="capture id 0 is the output of the embedding"):
        to_layer_outputs((0, 4))
    with pytest.raises(TargetError, match="no capture id 62; expected ids from 0 to 61"):
        check_capture_ids((0, 62), 61)
