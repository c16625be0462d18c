"""Prompts, rounds and numbers of the capture benchmark."""

from __future__ import annotations

import pytest

from benchmarks.capture import make_prompts, plan_rounds, summary
from eagle3_core.store.shards import ShardLayout

LAYOUT = ShardLayout(
    aux_layer_ids=(2, 4, 6), final_layer_id=8, hidden_size=16, dtype="bfloat16", final_state="all"
)
SAMPLE_BYTES = 2 * 16 * (3 + 1) * 10


def test_prompts_have_the_exact_length_and_no_two_rounds_share_one():
    rounds = make_prompts(num_prompts=8, num_tokens=10, vocab_size=50, repeats=2)
    assert [len(samples) for samples in rounds] == [8, 8, 8]
    samples = [sample for prompts in rounds for sample in prompts]
    assert {len(sample) for sample in samples} == {10}
    assert len({sample.key for sample in samples}) == 24
    assert len({sample.input_ids.tobytes() for sample in samples}) == 24


def test_shards_of_a_round_hold_its_prompts_only():
    rounds = make_prompts(num_prompts=4, num_tokens=10, vocab_size=50, repeats=2)
    shards, ranges = plan_rounds(rounds, LAYOUT, shard_bytes=3 * SAMPLE_BYTES)
    assert [(shard.index, shard.start, shard.end) for shard in shards] == [
        (0, 0, 3),
        (1, 3, 4),
        (2, 4, 7),
        (3, 7, 8),
        (4, 8, 11),
        (5, 11, 12),
    ]
    assert ranges == [(0, 2), (2, 4), (4, 6)]


def taken(seconds: float, last_token_seconds: float, stored_bytes: int = 0, most_in_flight: int = 0) -> dict:
    return {
        "seconds": seconds,
        "last_token_seconds": last_token_seconds,
        "tokens": 1000,
        "stored_bytes": stored_bytes,
        "num_shards": 2,
        "most_in_flight": most_in_flight,
        "cpu_seconds": 2 * seconds,
    }


def test_the_ratio_is_the_median_over_rounds_side_by_side():
    result = summary(
        {
            "plain": [taken(1.0, 1.0), taken(2.0, 2.0), taken(4.0, 4.0)],
            "capture": [taken(1.25, 1.0, 70, 2), taken(2.5, 2.25, 70, 3), taken(4.0, 3.5, 70, 2)],
        }
    )
    assert result["round_ratios"] == pytest.approx([0.8, 0.8, 1.0])
    assert result["ratio"] == pytest.approx(0.8)
    assert result["tokens_per_second"] == pytest.approx({"plain": 500.0, "capture": 400.0})
    assert result["most_in_flight"] == 3
    assert result["cpu_seconds"] == pytest.approx({"plain": 14.0, "capture": 15.5})
    assert result["last_write_seconds"] == pytest.approx(0.25)
