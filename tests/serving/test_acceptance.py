"""Acceptance figures by hand, and the limits of a run."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.contracts import BenchmarkResult, PromptComparison
from eagle3_core.errors import BenchmarkError
from eagle3_core.serving.acceptance import TargetPass, acceptance_figures, check_acceptance, text_passes


def test_four_whole_passes_of_three_drafts_give_the_literal_figures() -> None:
    # 1 token from the prefill, then passes with 0, 1, 2 and 3 accepted: 1 + 2 + 3 + 4 tokens.
    passes = text_passes([3, 3, 3, 3], [0, 1, 2, 3], num_tokens=11)

    figures = acceptance_figures([passes], 3)

    assert figures.acceptance_length == 2.5
    assert figures.per_position == [0.75, 0.5, 0.25]
    assert figures.conditional == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert (figures.num_passes, figures.num_samples, figures.num_speculative_tokens) == (4, 1, 3)


def test_drafts_behind_the_end_of_sequence_are_not_counted() -> None:
    # A pass of six tokens, then one whose third of five accepted drafts ends the text: (6 + 3) / 2.
    passes = text_passes([5, 5], [5, 5], num_tokens=1 + 6 + 3)

    figures = acceptance_figures([passes], 5)

    assert passes == [TargetPass(5, 5, 6), TargetPass(5, 3, 3)]
    assert figures.acceptance_length == 4.5
    assert figures.per_position == [1.0, 1.0, 1.0, 0.5, 0.5]
    assert figures.conditional == [1.0] * 5, "the cut pass says nothing about positions 4 and 5"


def test_an_end_that_is_the_bonus_token_counts_the_rejection_before_it() -> None:
    passes = text_passes([3], [1], num_tokens=3)

    assert passes == [TargetPass(3, 1, 2)]
    assert acceptance_figures([passes], 3).conditional == [1.0, 0.0, None]


def test_passes_checked_after_the_end_are_dropped() -> None:
    assert text_passes([3, 3, 3], [1, 2, 3], num_tokens=3) == [TargetPass(3, 1, 2)]


def test_tokens_from_passes_without_a_proposal_are_passes_too() -> None:
    passes = text_passes([3], [2], num_tokens=6)

    figures = acceptance_figures([passes], 3)

    assert passes == [TargetPass(3, 2, 3), TargetPass(0, 0, 1), TargetPass(0, 0, 1)]
    assert figures.acceptance_length == pytest.approx(5 / 3)
    assert figures.conditional == [1.0, 1.0, 0.0], "a pass without a proposal rejects nothing"


def test_an_answer_of_one_token_has_no_pass() -> None:
    assert text_passes([], [], num_tokens=1) == []


def test_a_draft_that_proposes_nothing_is_an_error_and_not_an_acceptance_of_one() -> None:
    with pytest.raises(BenchmarkError, match="proposed nothing"):
        acceptance_figures([text_passes([], [], num_tokens=9)], 3)


def test_a_low_acceptance_length_fails_with_measured_and_limit() -> None:
    with pytest.raises(BenchmarkError, match=r"1\.200 with K=3 on 20 prompts.*min_acceptance_length = 1\.4"):
        check_acceptance(_result(acceptance_length=1.2), _config())


def test_an_acceptance_length_at_the_limit_passes() -> None:
    check_acceptance(_result(acceptance_length=1.4), _config())


def test_a_draft_of_which_nothing_is_accepted_fails(caplog: pytest.LogCaptureFixture) -> None:
    nothing = acceptance_figures([text_passes([3] * 10, [0] * 10, num_tokens=11)] * 20, 3)
    result = _result().model_copy(update={"acceptance": nothing})

    with pytest.raises(BenchmarkError, match="accepted no drafted token in 200 passes"):
        check_acceptance(result, _config(benchmark={}))
    with caplog.at_level(logging.WARNING):
        check_acceptance(result, _config(benchmark={}, limit=10))
    assert "accepted no drafted token" in caplog.text


def test_a_rehearsal_only_warns_of_a_low_acceptance_length(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_acceptance(_result(acceptance_length=1.2), _config(limit=10))

    assert "1.200" in caplog.text


def test_an_output_that_the_draft_changed_fails_in_a_rehearsal_too() -> None:
    changed = PromptComparison(key="code-1", num_tokens=9, first_difference=4, tie=False, margin=3.0)

    with pytest.raises(BenchmarkError, match="1 of 20 prompts, first code-1 at token 4"):
        check_acceptance(_result(lossless="differs", comparisons=[changed]), _config(limit=10))


def test_too_many_ties_fail_a_run_and_warn_in_a_rehearsal(caplog: pytest.LogCaptureFixture) -> None:
    tie = PromptComparison(key="code-1", num_tokens=9, first_difference=4, tie=True, margin=0.01)
    result = _result(lossless="differs", comparisons=[tie] * 3)

    with pytest.raises(BenchmarkError, match="3 of 20 prompts differ at a rounding tie"):
        check_acceptance(result, _config())
    with caplog.at_level(logging.WARNING):
        check_acceptance(result, _config(limit=10))
    assert "rounding tie" in caplog.text


def _config(**fields: Any) -> RunConfig:
    document = {"name": "test", "target": {"model": "x"}, "benchmark": {"min_acceptance_length": 1.4}}
    return parse_config(document | fields)


def _result(acceptance_length: float = 2.0, **fields: Any) -> BenchmarkResult:
    figures = acceptance_figures([text_passes([3], [1], num_tokens=3)] * 20, 3)
    document = {
        "engine": "vllm",
        "dataset_hash": "0",
        "num_prompts": 20,
        "max_tokens": 64,
        "acceptance": figures.model_copy(update={"acceptance_length": acceptance_length}),
        "lossless": "identical",
        "comparisons": [],
        "baseline_tokens_per_second": None,
        "draft_tokens_per_second": None,
        "speed_ratio": None,
    }
    return BenchmarkResult(**document | fields)
