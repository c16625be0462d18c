"""Speed without the warm-up."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.training.meter import Meter, StepCost

pytestmark = pytest.mark.engine


def test_the_first_step_is_the_warm_up_and_not_part_of_the_speed() -> None:
    meter = Meter(torch.device("cpu"), "float32")
    assert meter.tokens_per_second is None
    assert meter.warm_up_seconds is None
    own = meter.add(StepCost(tokens=100, flops=1e9, seconds=10.0, waited=5.0))
    assert own["tokens_per_second"] == 10.0
    assert meter.tokens_per_second == 10.0
    meter.add(StepCost(tokens=100, flops=1e9, seconds=1.0, waited=0.0))
    meter.add(StepCost(tokens=300, flops=1e9, seconds=3.0, waited=1.0))
    assert meter.tokens_per_second == 100.0
    assert meter.data_wait_share == 0.25
    assert meter.warm_up_seconds == 10.0
    assert meter.figures()["warm_up_seconds"] == 10.0


def test_utilisation_counts_the_operations_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3_core.training.meter.peak_flops", lambda name, dtype: 1e9)
    meter = Meter(torch.device("cpu"), "float32", num_ranks=2)
    meter.add(StepCost(tokens=1, flops=1e9, seconds=50.0, waited=0.0))
    meter.add(StepCost(tokens=1, flops=1e9, seconds=1.0, waited=0.0))
    assert meter.mfu == 0.5
