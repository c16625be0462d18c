"""Steps that are not finite, and spikes beside recent steps."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_core.sections import TrainConfig
from eagle3_core.training.health import RecentSteps, judge_step, name_samples, spike_limit

STEADY = [2.0, 2.1, 1.9, 2.0] * 8


def recent(num_skipped: int = 0) -> RecentSteps:
    return RecentSteps(list(STEADY), [1.0] * len(STEADY), num_skipped)


def judge(loss: float, norm: float, num_skipped: int = 0, **settings: Any) -> tuple[str, str]:
    verdict = judge_step(loss, norm, recent(num_skipped), TrainConfig(**settings))
    return verdict.action, verdict.reason


def test_an_ordinary_step_is_taken_without_a_word() -> None:
    assert judge(2.05, 1.1) == ("take", "")


@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 1.0), (2.0, float("inf")), (float("-inf"), 1.0)])
def test_a_step_that_is_not_finite_stops_or_is_left_out(loss: float, norm: float) -> None:
    assert judge(loss, norm) == ("stop", "it is not finite")
    assert judge(loss, norm, on_nonfinite="skip") == ("skip", "it is not finite")


def test_the_limit_of_a_spike_by_hand() -> None:
    """The median is 2.0 and the deviation 0.05 in half of the steps: a tenth of the median is more."""
    assert spike_limit(STEADY, 10.0) == pytest.approx(2.0 + 10 * 0.2)
    wide = [1.0, 3.0] * 8
    assert spike_limit(wide, 10.0) == pytest.approx(2.0 + 10 * 1.4826)
    assert spike_limit(STEADY[:15], 10.0) is None


@pytest.mark.parametrize(("loss", "norm", "what"), [(4.1, 1.0, "loss"), (2.0, 2.1, "gradient norm")])
def test_a_spike_is_taken_with_a_warning_left_out_or_ends_training(
    loss: float, norm: float, what: str
) -> None:
    for policy, action in (("warn", "take"), ("skip", "skip"), ("stop", "stop")):
        found, reason = judge(loss, norm, on_spike=policy)
        assert found == action
        assert reason.startswith(f"its {what} is above ")
        assert reason.endswith("a spike beside the last 32 steps")


def test_a_few_outliers_do_not_hide_the_next_one() -> None:
    steps = recent()
    steps.losses[3:9] = [500.0] * 6
    assert judge_step(4.5, 1.0, steps, TrainConfig(on_spike="skip")).is_spike


def test_no_more_steps_than_allowed_are_left_out() -> None:
    assert judge(float("nan"), 1.0, 7, on_nonfinite="skip")[0] == "skip"
    action, reason = judge(float("nan"), 1.0, 8, on_nonfinite="skip")
    assert action == "stop"
    assert reason.endswith("train.max_skipped_steps allows 8 steps left out")
    assert judge(100.0, 1.0, 0, on_spike="skip", max_skipped_steps=0)[0] == "stop"


def test_only_the_last_steps_are_remembered() -> None:
    steps = RecentSteps()
    for number in range(40):
        steps.add(float(number), 1.0, window=16)
    assert steps.losses == [float(number) for number in range(24, 40)]
    assert RecentSteps(**steps.document()) == steps


def test_of_many_samples_the_first_are_named() -> None:
    assert name_samples(["a", "b"]) == "a, b"
    assert name_samples([str(n) for n in range(1022)]).endswith(", 19 and 1,002 more")
