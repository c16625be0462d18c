"""Token-by-token comparison of outputs with and without a draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eagle3_core.contracts import PromptComparison
from eagle3_core.serving.lossless import OutputPair, classify, compare_outputs
from eagle3_core.target.rounding import is_tie


def test_equal_outputs_need_no_reference() -> None:
    def refuse() -> Any:
        raise AssertionError("the reference was loaded")

    comparisons = compare_outputs([OutputPair("a", [1], [2, 3], [2, 3])], refuse)

    assert comparisons == [PromptComparison(key="a", num_tokens=2, first_difference=None, tie=False)]
    assert classify(comparisons) == "identical"


def test_the_first_difference_is_judged_on_the_common_prefix() -> None:
    prefixes: list[list[int]] = []
    pair = OutputPair("a", prompt=[7, 8], baseline=[1, 2, 3, 4], draft=[1, 2, 5, 9])

    (comparison,) = compare_outputs([pair], _reference({3: 16.0, 5: 15.9}, prefixes))

    assert prefixes == [[7, 8, 1, 2]]
    assert (comparison.first_difference, comparison.tie) == (2, True)
    assert comparison.margin == pytest.approx(0.1)


def test_logits_further_apart_than_two_bf16_units_are_no_tie() -> None:
    # 2 x 2^-8 x 16 = 0.125
    assert is_tie(16.0, 15.875)
    assert not is_tie(16.0, 15.874)
    assert is_tie(-16.0, -15.875)


def test_an_output_that_only_ends_earlier_differs() -> None:
    (comparison,) = compare_outputs([OutputPair("a", [1], [2, 3, 4], [2, 3])], _reference({}, []))

    assert (comparison.first_difference, comparison.tie, comparison.margin) == (2, False, None)
    assert classify([comparison]) == "differs"


def test_the_reference_is_loaded_once() -> None:
    loads = []

    def load() -> Callable[[list[int]], dict[int, float]]:
        loads.append(1)
        return _reference({2: 1.0, 3: 1.0}, [])()

    compare_outputs([OutputPair(key, [1], [2], [3]) for key in "abc"], load)  # type: ignore[arg-type]

    assert len(loads) == 1


def test_ties_in_one_prompt_of_ten_are_ties_and_in_more_a_difference() -> None:
    assert classify([_tie()] + [_same()] * 9) == "ties"
    assert classify([_tie()] * 2 + [_same()] * 17) == "differs"
    assert classify([_tie()] * 2 + [_same()] * 18) == "ties"


def test_one_difference_that_is_no_tie_is_a_difference() -> None:
    wrong = _tie().model_copy(update={"tie": False})

    assert classify([wrong] + [_same()] * 99) == "differs"


def _same() -> PromptComparison:
    return PromptComparison(key="same", num_tokens=4, first_difference=None, tie=False)


def _tie() -> PromptComparison:
    return PromptComparison(key="tie", num_tokens=4, first_difference=1, tie=True, margin=0.0)


def _reference(logits: dict[int, float], prefixes: list[list[int]]) -> Any:
    def next_logits(prefix: list[int]) -> dict[int, float]:
        prefixes.append(prefix)
        return logits

    return lambda: next_logits
