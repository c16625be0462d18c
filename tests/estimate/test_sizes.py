"""Bytes of artifacts, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eagle3_core.errors import DataError
from eagle3_core.estimate.sizes import (
    artifact_sizes,
    capture_bytes,
    draft_parameters,
    state_bytes,
)
from eagle3_core.estimate.workload import Load, count_samples, guess_samples
from eagle3_core.store.dataset import Sample
from eagle3_core.target.info import inspect_target
from tests.doubles.profile import stand_in_config
from tests.doubles.target import make_target

pytestmark = pytest.mark.orchestrator


def sample(key: str, length: int, answer: int) -> Sample:
    ids = np.arange(length, dtype=np.int32)
    mask = (np.arange(length) >= length - answer).astype(np.uint8)
    return Sample(key, "code", "train", ids, mask, length - answer, "stop")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_thousand_samples_of_two_hundred_tokens_need_102_400_000_bytes_of_states(
    tmp_path: Path, is_known: bool
) -> None:
    """Hidden 64, bf16, three auxiliary states and every final state; in shards at most 5 % more."""
    config = stand_in_config(tmp_path, capture={"final_state": "all", "shard_bytes": 8 << 20})
    target = inspect_target(make_target(tmp_path / "wide", hidden_size=64))
    load = count_samples([sample(f"sample-{n:04d}", 200, 50) for n in range(1000)])
    load = load if is_known else Load(load.rows)
    assert state_bytes(config, target, load) == 102_400_000
    assert 102_400_000 <= capture_bytes(config, target, load) <= 102_400_000 * 1.05


def test_stored_final_states_follow_the_policy(tmp_path: Path) -> None:
    """Rows of 16 values in bf16: 3 x 100 auxiliary and 40 final ones are 10,880 bytes."""
    config = stand_in_config(tmp_path)
    target = inspect_target(tmp_path / "target")
    assert state_bytes(config, target, Load([(100, 40)])) == 10_880
    assert state_bytes(config, target, count_samples([sample("a", 100, 40)])) == 10_880


def test_draft_parameters_are_counted_by_hand(tmp_path: Path) -> None:
    """Hidden 16, 4 heads of 4, 2 key heads, MLP 32, one layer, vocabulary 64 of the frozen head."""
    config = stand_in_config(tmp_path)
    target = inspect_target(tmp_path / "target")
    fusion = 3 * 16 * 16
    attention = 32 * (4 + 2 + 2) * 4 + 16 * 16
    mlp, norms = 3 * 16 * 32, 3 * 16 + 16
    assert draft_parameters(config, target) == (fusion + attention + mlp + norms, 64 * 16)


def test_while_training_three_states_and_the_weights_of_three_epochs_lie_there(tmp_path: Path) -> None:
    target = inspect_target(make_target(tmp_path / "target", hidden_size=64))
    load = Load([(100, 40)] * 8)
    trained, kept = draft_parameters(stand_in_config(tmp_path), target)
    for epochs, best in ((1, 1), (2, 2), (8, 3)):
        config = stand_in_config(tmp_path, train={"num_epochs": epochs})
        size = artifact_sizes(config, target, load)["checkpoint"]
        assert 0 <= size.peak - 4 * trained * (3 * 3 + best) < 120_000
        assert 0 <= size.final - 4 * (trained + kept) < 40_000


@pytest.mark.parametrize(("keep_last", "keep_best"), [(1, 1), (2, 3), (4, 2)])
def test_what_is_kept_by_the_settings_is_counted(tmp_path: Path, keep_last: int, keep_best: int) -> None:
    target = inspect_target(make_target(tmp_path / "target", hidden_size=64))
    settings = {"num_epochs": 8, "keep_last": keep_last, "keep_best": keep_best}
    config = stand_in_config(tmp_path, train=settings)
    trained, kept = draft_parameters(config, target)
    size = artifact_sizes(config, target, Load([(100, 40)] * 8))["checkpoint"]
    states = 3 * (keep_last + 1)
    assert 0 <= size.peak - 4 * trained * (states + keep_last + keep_best) < 200_000
    assert 0 <= size.final - 4 * (trained * keep_best + kept) < 40_000


def test_prompts_are_counted_with_the_longest_answers(tmp_path: Path) -> None:
    """`What is 3?` has ten characters: two tokens and eight for the template, and 16 for the answer."""
    load = guess_samples(stand_in_config(tmp_path)).workload
    assert (load.num_samples, load.num_tokens, load.num_answer_tokens) == (8, 8 * 26, 8 * 16)
    assert not load.is_exact


def test_a_small_vocabulary_needs_more_tokens_for_the_same_text(tmp_path: Path) -> None:
    """With 256 tokens one stands for two characters: five and sixteen for the template."""
    load = guess_samples(stand_in_config(tmp_path), vocab_size=256).workload
    assert load.num_tokens == 8 * (5 + 16 + 16)


def test_a_rehearsal_counts_only_its_prompts(tmp_path: Path) -> None:
    config = stand_in_config(tmp_path).model_copy(update={"limit": 5})
    assert guess_samples(config).workload.num_samples == 5


def test_the_prompts_of_a_rehearsal_are_those_that_prepare_takes_up(tmp_path: Path) -> None:
    """Of each kind in turn, not the first ones: here the long ones stand at the end."""
    config = stand_in_config(tmp_path).model_copy(update={"limit": 8})
    short = [{"kind": "short", "messages": [{"role": "user", "content": f"{n}"}]} for n in range(50)]
    long = [{"kind": "long", "messages": [{"role": "user", "content": f"{n:0400}"}]} for n in range(50)]
    Path(config.data.prompts[0]).write_text("".join(json.dumps(row) + "\n" for row in (*short, *long)))
    assert guess_samples(config).workload.num_tokens == 4 * (8 + 16) + 4 * (100 + 8 + 16)


def test_a_dataset_is_counted_and_its_head_is_what_a_limit_leaves() -> None:
    load = count_samples([sample(key, 5, 3) for key in "abc"])
    assert (load.workload.num_tokens, load.workload.num_answer_tokens) == (15, 9)
    assert load.workload.is_exact
    assert load.head(2).workload.num_tokens == 10


def test_unreadable_prompts_are_an_error(tmp_path: Path) -> None:
    config = stand_in_config(tmp_path)
    (tmp_path / "prompts.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot read the prompts"):
        guess_samples(config)
