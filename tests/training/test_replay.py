"""Replayed decoding, with figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_core.training.replay import replay_figures, replay_passes


def _correct(depth: int, tokens: int, right: dict[int, list[int]]) -> np.ndarray:
    """[depth, tokens]; `right` maps a row to the steps whose choice is right."""
    table = np.zeros((depth, tokens), bool)
    for row, steps in right.items():
        table[steps, row] = True
    return table


def _counts(table: np.ndarray, prompt_length: int, num_tokens: int) -> list[tuple[int, int]]:
    return [(each.accepted, each.produced) for each in replay_passes(table, prompt_length, num_tokens)]


def test_the_example_of_the_module() -> None:
    table = _correct(2, 7, {1: [0, 1], 4: [0]})
    assert _counts(table, prompt_length=2, num_tokens=5) == [(2, 3), (1, 1)]


def test_a_wrong_choice_hides_right_ones_behind_it() -> None:
    table = _correct(3, 8, {0: [1, 2], 1: [0, 2]})
    assert _counts(table, prompt_length=1, num_tokens=5) == [(0, 1), (1, 2), (0, 1)]


def test_nothing_right_gives_one_token_a_pass() -> None:
    figures = replay_figures([replay_passes(np.zeros((3, 10), bool), 4, 6)], 3)
    assert figures.num_passes == 5
    assert figures.acceptance_length == 1.0
    assert figures.per_position == [0.0, 0.0, 0.0]
    assert figures.conditional == [0.0, None, None]


def test_everything_right_gives_k_plus_one() -> None:
    figures = replay_figures([replay_passes(np.ones((3, 20), bool), 2, 17)], 3)
    assert figures.acceptance_length == 4.0
    assert figures.per_position == [1.0, 1.0, 1.0]


def test_accepted_0_1_2_3_gives_length_2_5() -> None:
    table = _correct(3, 12, {0: [], 1: [0], 3: [0, 1], 6: [0, 1, 2]})
    passes = replay_passes(table, prompt_length=1, num_tokens=11)
    assert [each.accepted for each in passes] == [0, 1, 2, 3]
    figures = replay_figures([passes], 3)
    assert figures.acceptance_length == 2.5
    assert figures.per_position == [0.75, 0.5, 0.25]
    assert figures.conditional == [0.75, pytest.approx(2 / 3), 0.5]


def test_choices_behind_the_end_are_not_counted() -> None:
    # K = 5: a pass of six tokens, then one in which all five choices are "right" but the third ends the text.
    passes = replay_passes(np.ones((5, 30), bool), prompt_length=1, num_tokens=1 + 6 + 3)
    assert [(each.accepted, each.produced) for each in passes] == [(5, 6), (3, 3)]
    assert replay_figures([passes], 5).acceptance_length == 4.5


def test_answers_of_one_token_have_no_pass() -> None:
    figures = replay_figures([replay_passes(np.ones((3, 5), bool), 4, 1)], 3)
    assert (figures.num_passes, figures.acceptance_length) == (0, 1.0)
