"""What a run will make, decided before anything starts."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_core.errors import DataError, HostError, StoreError, TargetError
from eagle3_core.estimate import (
    Workload,
    artifact_bytes,
    check_space,
    count_tokens,
    draft_parameters,
    estimate_run,
    guess_tokens,
)
from eagle3_core.host.run_folder import create_run_folder
from eagle3_core.pipeline import run_stage
from eagle3_core.planning import plan_run
from eagle3_core.store.dataset import Sample
from eagle3_core.target.info import inspect_target
from tests.doubles.profile import stand_in_config
from tests.doubles.target import make_target

FIRST = ["conversations", "dataset", "vocabulary"]

pytestmark = pytest.mark.orchestrator


def prepare(config):
    create_run_folder(config, ["prepare"], "r")
    run_stage("prepare", config, "r")


def test_ids_before_the_dataset_exists_end_with_the_vocabulary(tmp_path):
    plan = plan_run(stand_in_config(tmp_path))
    assert list(plan.artifacts) == FIRST
    with pytest.raises(
        StoreError,
        match=r"stage train needs dataset/.*run the stage prepare .*--stages prepare,extract,verify,train`",
    ):
        plan.inputs("train")


def test_all_ids_are_known_once_the_dataset_exists(tmp_path):
    config = stand_in_config(tmp_path)
    prepare(config)
    plan = plan_run(config)
    assert list(plan.artifacts) == [
        *FIRST, "capture", "verification", "checkpoint", "export", "benchmark",
    ]  # fmt: skip
    assert plan.inputs("extract") == {"dataset": plan.artifacts["dataset"].ref}
    with pytest.raises(StoreError, match="run the stage extract first"):
        plan.inputs("verify")


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"data": {"max_length": 128}}, ["conversations"]),
        ({"draft": {"vocab_size": 32}}, ["conversations", "dataset"]),
        ({"train": {"num_epochs": 2}}, FIRST),
        ({"engine": {"max_model_len": 300}}, []),
    ],
)
def test_an_id_changes_with_what_determines_it_and_with_nothing_else(tmp_path, change, same):
    before = plan_run(stand_in_config(tmp_path)).artifacts
    changes = {key: value for key, value in change.items() if key in ("data", "engine")}
    rest = {key: value for key, value in change.items() if key not in changes}
    config = stand_in_config(tmp_path, **changes)
    config = config.model_copy(
        update={key: getattr(config, key).model_copy(update=value) for key, value in rest.items()}
    )
    after = plan_run(config).artifacts
    assert [kind for kind in FIRST if before[kind].ref == after[kind].ref] == same


def test_a_changed_prompt_file_changes_every_id(tmp_path):
    config = stand_in_config(tmp_path)
    before = plan_run(config).artifacts
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("What is 3?", "What is three?"))
    after = plan_run(config).artifacts
    assert all(before[kind].ref != after[kind].ref for kind in FIRST)


def test_a_target_too_small_for_the_default_ids_is_refused(tmp_path):
    config = stand_in_config(tmp_path)
    make_target(tmp_path / "target", num_layers=4)
    with pytest.raises(TargetError, match=r"4 layers is too small .* set target.aux_layer_ids"):
        plan_run(config)


def test_states_of_a_known_dataset_are_counted_to_the_byte(tmp_path):
    """1,000 samples of 200 tokens, hidden 64, bf16, three auxiliary states and every final state."""
    config = stand_in_config(tmp_path)
    config = config.model_copy(update={"capture": config.capture.model_copy(update={"final_state": "all"})})
    target = inspect_target(make_target(tmp_path / "wide", hidden_size=64))
    load = Workload(num_samples=1000, num_tokens=200_000, num_answer_tokens=50_000, is_exact=True)
    size = artifact_bytes(config, target, load)["capture"]
    assert 102_400_000 <= size <= 102_400_000 * 1.05


def test_stored_final_states_follow_the_policy(tmp_path):
    """Rows of 16 values in bf16: 3 x 100 auxiliary and 40 final ones are 10,880 bytes."""
    config = stand_in_config(tmp_path)
    target = inspect_target(tmp_path / "target")
    load = Workload(num_samples=1, num_tokens=100, num_answer_tokens=40, is_exact=True)
    assert artifact_bytes(config, target, load)["capture"] == round(10_880 * 1.02)


def test_draft_parameters_are_counted_by_hand(tmp_path):
    """Hidden 16, 4 heads of 4, 2 key heads, MLP 32, one layer, vocabulary 64 of the frozen head."""
    config = stand_in_config(tmp_path)
    target = inspect_target(tmp_path / "target")
    fusion = 3 * 16 * 16
    attention = 32 * (4 + 2 + 2) * 4 + 16 * 16
    mlp, norms = 3 * 16 * 32, 3 * 16 + 16
    assert draft_parameters(config, target) == (fusion + attention + mlp + norms, 64 * 16)


def test_prompts_give_an_upper_estimate_with_the_longest_answers(tmp_path):
    """`What is 3?` has ten characters: two tokens and eight for the template, and 16 for the answer."""
    load = guess_tokens(stand_in_config(tmp_path))
    assert (load.num_samples, load.num_tokens, load.num_answer_tokens) == (8, 8 * 26, 8 * 16)
    assert not load.is_exact


def test_a_rehearsal_counts_only_its_prompts(tmp_path):
    config = stand_in_config(tmp_path).model_copy(update={"limit": 5})
    assert guess_tokens(config).num_samples == 5


def test_a_dataset_is_counted():
    ids, mask = np.arange(5, dtype=np.int32), np.array([0, 0, 1, 1, 1], np.uint8)
    load = count_tokens([Sample("a", "code", "train", ids, mask, 2, "stop")] * 3)
    assert (load.num_tokens, load.num_answer_tokens, load.is_exact) == (15, 9, True)


def test_what_is_there_is_not_to_be_written_again(tmp_path):
    config = stand_in_config(tmp_path)
    before = estimate_run(plan_run(config))
    assert all(artifact.new_bytes > 0 for artifact in before.artifacts)
    prepare(config)
    after = estimate_run(plan_run(config))
    by_kind = {artifact.kind: artifact for artifact in after.artifacts}
    assert [by_kind[kind].new_bytes for kind in FIRST] == [0, 0, 0]
    assert after.minutes["prepare"] == 0
    assert after.workload.is_exact
    assert by_kind["capture"].ref is not None


def test_stages_that_do_not_run_write_nothing(tmp_path):
    estimate = estimate_run(plan_run(stand_in_config(tmp_path)), ["prepare"])
    assert {artifact.kind for artifact in estimate.artifacts if artifact.new_bytes} == set(FIRST)
    assert list(estimate.minutes) == ["prepare"]


def test_a_run_that_does_not_fit_is_refused_with_both_numbers(tmp_path):
    config = stand_in_config(tmp_path)
    estimate = estimate_run(plan_run(config)).model_copy(update={"free_bytes": 1000})
    with pytest.raises(HostError, match=rf"needs {estimate.new_bytes:,} bytes .* 1,000 are free"):
        check_space(estimate, config)


def test_unreadable_prompts_are_an_error(tmp_path):
    config = stand_in_config(tmp_path)
    (tmp_path / "prompts.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot read the prompts"):
        guess_tokens(config)
