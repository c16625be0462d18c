"""The step `verify` on captures that are right, and on ones that are wrong behind a right hash."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3_core.capture import extract, verify
from eagle3_core.capture.checks import spread
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.config import RunConfig
from eagle3_core.contracts import StepSpec
from eagle3_core.data.vocabulary import save_vocabulary
from eagle3_core.errors import StoreError, VerificationError
from eagle3_core.identity import plan_checkpoint, plan_labels, plan_vocabulary
from eagle3_core.step import Progress
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import CapturedSample, ShardReader
from eagle3_core.target.info import inspect_target
from eagle3_core.training import train
from tests.capture.damage import NUM_SAMPLES, change_shard, greedy_samples, in_copied_store, put
from tests.capture.runs import capture_folder, capture_spec, make_samples, verify_spec
from tests.tiny import make_tiny_target
from tests.training.examples import make_vocabulary

pytestmark = pytest.mark.engine

PROGRESS = Progress("verify")


def test_a_right_capture_passes_with_full_agreement_and_its_result_is_stored(spec: StepSpec) -> None:
    asked = verify_spec(spec)
    result = verify.run(asked, PROGRESS)
    assert (result.num_shards, result.num_samples, result.bad_samples) == (10, 10, [])
    assert result.num_rows_checked == 10 * 7
    assert result.agreement == 1.0
    assert [(check.capture_id, check.nearest_id) for check in result.layers] == [
        (2, 2),
        (4, 4),
        (5, 5),
        (8, 8),
    ]
    assert all(check.median_error < 1e-5 for check in result.layers)
    assert all(check.nearest_wrong_median > 0.05 for check in result.layers)
    manifest = LocalStore(spec.config.store_path).read(asked.outputs["verification"].ref)
    assert manifest.facts["result"] == result.model_dump(mode="json")


def test_nan_and_inf_are_named_with_sample_layer_and_count(made: StepSpec, tmp_path: Path) -> None:
    spec = in_copied_store(made, tmp_path)
    change_shard(spec, 3, put("aux_states", 7, float("nan")))
    change_shard(spec, 6, put("final_states", 2, float("inf")))
    with pytest.raises(VerificationError, match=r"2 bad samples.*at most 0"):
        verify.run(verify_spec(spec), PROGRESS)
    allowed = in_copied_store(spec, tmp_path / "allowed", max_bad_samples=2)
    result = verify.run(verify_spec(allowed), PROGRESS)
    assert [(bad.key, bad.shard, bad.problem) for bad in result.bad_samples] == [
        ("sample-003", "shard-00003.safetensors", "capture id 2 has 1 NaN and 0 Inf"),
        ("sample-006", "shard-00006.safetensors", "capture id 8 has 0 NaN and 1 Inf"),
    ]
    assert result.num_rows_checked == 8 * 7


def test_samples_that_changed_places_are_found(spec: StepSpec) -> None:
    change_shard(spec, 4, lambda sample: replace(sample, key="sample-005"))
    with pytest.raises(VerificationError, match=r"shard-00004\.safetensors: keys .*sample-005"):
        verify.run(verify_spec(spec), PROGRESS)


def test_a_final_state_after_the_norm_is_found(spec: StepSpec) -> None:
    for index in range(NUM_SAMPLES):
        change_shard(
            spec,
            index,
            lambda s: replace(s, final_states=s.final_states / s.final_states.norm(dim=1)[:, None]),
        )
    with pytest.raises(VerificationError, match=r"capture id 8 is .* from its own layer"):
        verify.run(verify_spec(spec), PROGRESS)


def test_a_layer_off_by_one_is_found(spec: StepSpec) -> None:
    model = ReferenceModel(inspect_target(Path(spec.target_path)), "float32")

    def off_by_one(sample: CapturedSample) -> CapturedSample:
        states, _ = model.forward(sample.input_ids, (3, 4, 5))
        return replace(sample, aux_states=states)

    for index in range(NUM_SAMPLES):
        change_shard(spec, index, off_by_one)
    with pytest.raises(VerificationError, match=r"capture id 2 .*\(nearest is 3\)"):
        verify.run(verify_spec(spec), PROGRESS)


def test_wrong_layers_in_one_shard_are_not_hidden_by_the_right_ones(made: StepSpec, tmp_path: Path) -> None:
    spec = in_copied_store(made, tmp_path, reference_samples=NUM_SAMPLES)
    model = ReferenceModel(inspect_target(Path(spec.target_path)), "float32")

    def off_by_one(sample: CapturedSample) -> CapturedSample:
        return replace(sample, aux_states=model.forward(sample.input_ids, (3, 5, 6))[0])

    change_shard(spec, 7, off_by_one)
    with pytest.raises(
        VerificationError, match=r"\(3 comparisons\): capture id 2 .*in the sample sample-007"
    ):
        verify.run(verify_spec(spec), PROGRESS)


def test_the_reference_samples_come_from_shards_all_over_the_capture(made: StepSpec, tmp_path: Path) -> None:
    spec = in_copied_store(made, tmp_path, reference_samples=2)
    change_shard(spec, 5, lambda sample: replace(sample, aux_states=sample.aux_states.flip(1)))
    with pytest.raises(VerificationError, match=r"in the sample sample-005"):
        verify.run(verify_spec(spec), PROGRESS)


def test_without_reference_samples_the_log_says_what_is_not_checked(
    made: StepSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = in_copied_store(made, tmp_path, reference_samples=0)
    assert verify.run(verify_spec(spec), PROGRESS).layers == []
    assert "no layer is compared with a reference forward" in caplog.text


def test_final_states_of_the_layer_before_do_not_give_the_targets_tokens(spec: StepSpec) -> None:
    model = ReferenceModel(inspect_target(Path(spec.target_path)), "float32")

    def earlier(sample: CapturedSample) -> CapturedSample:
        states, _ = model.forward(sample.input_ids, (6,))
        return replace(sample, final_states=states[sample.final_rows, 0])

    for index in range(NUM_SAMPLES):
        change_shard(spec, index, earlier)
    with pytest.raises(VerificationError, match=r"give the next token in 0.*min_next_token_agreement"):
        verify.run(verify_spec(spec), PROGRESS)


def test_two_samples_that_changed_states_are_found_among_many_right_ones(
    made: StepSpec, tmp_path: Path
) -> None:
    spec = in_copied_store(made, tmp_path, min_next_token_agreement=0.5)
    paths = sorted(capture_folder(spec).glob("*.safetensors"))
    stored = [ShardReader(path).sample(0) for path in paths]
    for one, other in ((3, 8), (8, 3)):
        states = stored[other].final_states
        change_shard(spec, one, lambda sample, states=states: replace(sample, final_states=states))
    with pytest.raises(VerificationError, match=r"2 samples \(sample-003: . of 7 rows; sample-008: . of 7"):
        verify.run(verify_spec(spec), PROGRESS)


def test_answers_that_were_sampled_are_checked_against_a_reference_forward(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target")
    sampled = capture_spec(
        tmp_path, target, make_samples([24, 30, 26]), data={"generation": {"temperature": 1.0}}
    )
    extract.run(sampled, Progress("extract"))
    assert verify.run(verify_spec(sampled), PROGRESS).agreement == 1.0


def in_shards(target: Path) -> Path:
    """The same target as several files with an index."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    (target / "model.safetensors").unlink()
    model.save_pretrained(target, max_shard_size="500KB")
    return target


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_tied_and_sharded_targets_are_captured_and_verified(
    tmp_path: Path, tied: bool, sharded: bool
) -> None:
    target = make_tiny_target(tmp_path / "target", tied=tied)
    if sharded:
        assert len(list(in_shards(target).glob("model-*.safetensors"))) > 2
    spec = capture_spec(tmp_path, target, greedy_samples(target))
    extract.run(spec, Progress("extract"))
    assert verify.run(verify_spec(spec), PROGRESS).agreement == 1.0


def test_an_incomplete_capture_is_refused(spec: StepSpec) -> None:
    shutil.rmtree(capture_folder(spec))
    with pytest.raises(StoreError, match="run the stage"):
        verify.run(verify_spec(spec), PROGRESS)


def test_chosen_samples_are_spread_evenly() -> None:
    assert spread(10, 3) == [0, 3, 6]
    assert spread(2, 8) == [0, 1]
    assert spread(0, 8) == []


def train_spec(verified: StepSpec) -> StepSpec:
    """A spec of the step `train` on a capture that `verify` has looked at."""
    config = RunConfig.model_validate(
        verified.config.model_dump()
        | {
            "draft": {"vocab_size": 64},
            "train": {"compute_dtype": "float32", "pack_tokens": 64, "num_epochs": 1},
            "benchmark": {"num_prompts": 2, "max_tokens": 8},
        }
    )
    info, store = inspect_target(Path(verified.target_path)), LocalStore(config.store_path)
    vocabulary = plan_vocabulary(config, info, verified.inputs["dataset"])
    with store.writer(vocabulary) as writer:
        writer.complete([save_vocabulary(make_vocabulary(64, info.vocab_size), writer.folder)])
    labels = plan_labels(verified.inputs["capture"], vocabulary.ref)
    checkpoint = plan_checkpoint(config, info, verified.inputs["capture"], vocabulary.ref)
    inputs = verified.inputs | {
        "vocabulary": vocabulary.ref,
        "verification": verified.outputs["verification"].ref,
    }
    return verified.model_copy(
        update={"config": config, "outputs": {"labels": labels, "checkpoint": checkpoint}, "inputs": inputs}
    )


def test_two_samples_that_are_not_finite_are_quarantined_and_training_runs_on_the_other_eight(
    made: StepSpec, tmp_path: Path
) -> None:
    spec = in_copied_store(made, tmp_path, max_bad_samples=2)
    change_shard(spec, 3, put("aux_states", 7, float("nan")))
    change_shard(spec, 6, put("final_states", 2, float("inf")))
    verified = verify_spec(spec)
    found = verify.run(verified, PROGRESS)
    assert [bad.nonfinite[0].capture_id for bad in found.bad_samples] == [2, 8]
    trained = train.run(train_spec(verified), Progress("train"))
    assert trained.num_skipped_samples == 2
    losses = [loss for epoch in trained.epochs for loss in (epoch.train_loss, epoch.heldout_loss)]
    assert np.isfinite(losses).all()
    folder = LocalStore(spec.config.store_path).root / "checkpoint"
    (metrics,) = folder.glob("*/metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    used = {key for step in steps for key in step.get("samples", ())}
    assert used == {f"sample-{number:03d}" for number in range(10) if number % 5 != 4} - {
        "sample-003", "sample-006"
    }  # fmt: skip
