from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3_core.report.summary import summarise
from tests.deployments.loading import load_script
from tests.report import example

check_demo: Any = load_script(".ci/check_demo.py")
ALL_MAKING = ("prepare", "extract", "verify", "train", "export", "benchmark")


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    folder, store = example.make_run(tmp_path)
    return summarise(folder.path, store).model_dump(mode="json")


def bad(summary: dict[str, Any], reused: bool = False) -> list[str]:
    return [claim for claim, holds in check_demo.checks(summary, reused).items() if not holds]


def test_a_good_demo_passes(summary: dict[str, Any]) -> None:
    assert bad(summary) == []


@pytest.mark.parametrize(
    ("section", "field", "value", "words"),
    [
        ("benchmark", "acceptance_length", 1.39, "acceptance length"),
        ("benchmark", "num_speculative_tokens", 4, "acceptance length"),
        ("benchmark", "lossless", "differs", "outputs"),
        ("agreement", "accepted_ratio", 1.16, "trainer over vLLM"),
        ("agreement", "accepted_ratio", 0.84, "trainer over vLLM"),
        ("agreement", "first_position_difference", -0.08, "first-position"),
    ],
)
def test_each_promise_is_held_to(
    summary: dict[str, Any], section: str, field: str, value: Any, words: str
) -> None:
    summary[section][field] = value
    (claim,) = bad(summary)
    assert words in claim


def test_a_second_demo_must_reuse_everything(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path, reused=ALL_MAKING[:-1])
    summary = summarise(folder.path, store).model_dump(mode="json")
    assert [claim for claim in bad(summary, reused=True) if "benchmark" in claim]


def test_a_run_that_failed_early_is_one_bad_line(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path, until="train", failure="stage train failed: no luck")
    summary = summarise(folder.path, store).model_dump(mode="json")
    (claim,) = bad(summary)
    assert "stage train failed: no luck" in claim
