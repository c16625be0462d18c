"""What the host benchmark computes from its measurements, and sums over two real ranks."""

from __future__ import annotations

import pytest

from benchmarks import all_reduce
from benchmarks.all_reduce import bus_bandwidth
from benchmarks.host_engines import num_rounds, plan_rounds, summary
from benchmarks.host_training import FIRST_STEPS, NUM_STEPS, capture_size, compare_curves, figures_of

pytestmark = pytest.mark.engine


def test_two_ranks_sum_and_their_bandwidth_is_that_of_the_bytes_they_send():
    assert bus_bandwidth(1000, 2.0, 2) == 500.0
    assert bus_bandwidth(800, 1.0, 8) == 1400.0
    found = all_reduce.measure(2, "cpu", sizes=[1, 2])
    assert [each["bytes"] for each in found] == [1 << 20, 2 << 20]
    for each in found:
        assert each["bus_bytes_per_second"] == pytest.approx(each["bytes"] / each["seconds"])


def test_one_engine_and_all_of_them_take_turns_and_none_gets_a_round_twice():
    rounds = plan_rounds(4)
    assert [(mode, engines) for mode, engines, _ in rounds] == [
        ("plain", 1), ("capture", 1), ("capture", 4), ("capture", 4), ("capture", 1), ("plain", 1)
    ]  # fmt: skip
    for mode in ("plain", "capture"):
        numbers = [number for each, _, number in rounds if each == mode]
        assert numbers == list(range(1, len(numbers) + 1))
    assert num_rounds(4) == 4
    assert num_rounds(1) == 2
    assert {mode for mode, _, _ in plan_rounds(1)} == {"plain", "capture"}


def test_speeds_are_medians_by_mode_and_number_of_engines():
    rounds = [
        {"mode": "plain", "engines": 1, "tokens": 100, "seconds": seconds} for seconds in (1.0, 2.0, 4.0)
    ] + [{"mode": "capture", "engines": 2, "tokens": 200, "seconds": 4.0}]
    assert summary(rounds) == {"plain": {"1": 50.0}, "capture": {"2": 50.0}}


def record(seconds: float, waited: float, loss: float) -> dict:
    return {
        "seconds": seconds, "data_wait_seconds": waited, "tokens": 100, "loss": loss, "grad_norm": 1.0,
        "mfu": None, "peak_memory_gb": 1.0,
    }  # fmt: skip


def test_the_first_steps_do_not_count_for_speed_but_for_the_loss():
    first = [record(50.0, 20.0, 9.0)] * FIRST_STEPS
    found = figures_of([*first, record(1.0, 0.1, 5.0), record(2.0, 0.1, 4.0), record(4.0, 0.5, 3.0)])
    assert found["tokens_per_second"] == pytest.approx(50.0)
    assert found["data_wait_share"] == pytest.approx(0.1)
    assert found["losses"] == [9.0] * FIRST_STEPS + [5.0, 4.0, 3.0]


def test_loss_curves_are_compared_step_by_step():
    found = compare_curves([10.0, 8.0, 4.0], [10.0, 8.08, 3.9])
    assert found["fall"] == 6.0
    assert found["largest_difference"] == pytest.approx(0.1)
    assert found["largest_relative_difference"] == pytest.approx(0.025)


@pytest.mark.parametrize("shape", ["8b", "tiny"])
@pytest.mark.parametrize("packs", [1, 8])
def test_the_capture_has_full_packs_for_every_step(shape: str, packs: int):
    size = capture_size(shape, packs)
    pack_tokens = {"8b": 8192, "tiny": 128}[shape]
    assert size.num_train * size.lengths[0] == NUM_STEPS * packs * pack_tokens
    assert size.draft_vocab < size.shape.vocab
