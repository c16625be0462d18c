"""Shards that are wrong behind a right hash are condemned by the step `verify` and made anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3_core.capture import extract, verify
from eagle3_core.contracts import StepSpec
from eagle3_core.errors import VerificationError
from eagle3_core.step import Progress
from eagle3_core.store.files import file_entry
from eagle3_core.store.layout import ShardIndex
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import CapturedSample
from tests.capture.damage import (
    NUM_SAMPLES,
    change_shard,
    change_tensors,
    condemned_files,
    greedy_samples,
    in_copied_store,
    put,
)
from tests.capture.runs import capture_folder, capture_spec, verify_spec
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

PROGRESS = Progress("verify")


def times_of_shards(spec: StepSpec) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in capture_folder(spec).glob("*.safetensors")}


def row_less(sample: CapturedSample) -> CapturedSample:
    rows = len(sample.final_rows) - 1
    return CapturedSample(
        sample.key, sample.input_ids[:-1], sample.loss_mask[:-1], sample.aux_states[:-1],
        sample.final_states[:rows], sample.final_rows[:rows],
    )  # fmt: skip


def other_mask(sample: CapturedSample) -> CapturedSample:
    """One more token carries loss, and its final state is there."""
    mask = sample.loss_mask.clone()
    first = int(sample.final_rows[0]) - 1
    mask[first] = 1
    rows = torch.cat([torch.tensor([first]), sample.final_rows])
    states = torch.cat([sample.final_states[:1], sample.final_states])
    return replace(sample, loss_mask=mask, final_rows=rows, final_states=states)


def mask_entry_less(sample: CapturedSample) -> CapturedSample:
    """The last token carries no loss; nothing else is another."""
    mask = sample.loss_mask.clone()
    mask[-1] = 0
    return replace(sample, loss_mask=mask)


def other_id(sample: CapturedSample) -> CapturedSample:
    ids = sample.input_ids.clone()
    ids[5] += 1
    return replace(sample, input_ids=ids)


def test_shards_with_other_contents_are_condemned_and_made_anew_by_the_next_extract(
    made: StepSpec, tmp_path: Path
) -> None:
    """Right by their hashes: states of a row less, one other id, a mask entry more."""
    spec = in_copied_store(made, tmp_path)
    before = times_of_shards(spec)
    changes = {1: row_less, 4: other_id, 7: other_mask}
    for index, change in changes.items():
        change_shard(spec, index, change)
    store, ref = LocalStore(spec.config.store_path), spec.outputs["capture"].ref
    assert store.is_intact(ref)
    with pytest.raises(VerificationError, match="3 shards are not what the plan says") as error:
        verify.run(verify_spec(spec), PROGRESS)
    names = [f"shard-{index:05d}.safetensors" for index in changes]
    assert [one["shard"] for one in error.value.details["condemned"]] == names
    assert all(f"{name}: sample-00" in str(error.value) for name in names)
    assert list(store.problems(store.read(ref))) == names
    assert extract.run(spec, Progress("extract")).num_new_shards == 3
    after = times_of_shards(spec)
    assert {name for name in after if after[name] != before[name]} == set(names)
    assert store.is_intact(ref)
    assert verify.run(verify_spec(spec), PROGRESS).agreement == 1.0


def test_another_mask_is_found_where_the_final_states_of_all_rows_are_there(tmp_path: Path) -> None:
    """Under this policy the rows with final states say nothing of the mask, and the states are right."""
    target = make_tiny_target(tmp_path / "target")
    capture = {"shard_bytes": 4096, "final_state": "all"}
    spec = capture_spec(tmp_path, target, greedy_samples(target, [12, 13, 14]), capture=capture)
    extract.run(spec, Progress("extract"))
    assert verify.run(verify_spec(spec), PROGRESS).agreement == 1.0
    change_shard(spec, 1, mask_entry_less)
    message = r"shard-00001\.safetensors: sample-001: loss mask differ .* in 1 places, first at 20"
    with pytest.raises(VerificationError, match=message):
        verify.run(verify_spec(spec), PROGRESS)
    assert condemned_files(spec) == ["shard-00001.safetensors"]


def test_counts_that_contradict_each_other_behind_a_right_hash_condemn_their_shards(spec: StepSpec) -> None:
    """N - 1 rows of states to N tokens, and a loss mask of N + 1."""

    def rows_less(tensors: dict[str, torch.Tensor]) -> None:
        tensors["aux_states"] = tensors["aux_states"][:-1].contiguous()

    def longer_mask(tensors: dict[str, torch.Tensor]) -> None:
        tensors["loss_mask"] = torch.cat([tensors["loss_mask"], tensors["loss_mask"][-1:]])

    change_tensors(spec, 2, rows_less)
    change_tensors(spec, 5, longer_mask)
    assert LocalStore(spec.config.store_path).is_intact(spec.outputs["capture"].ref)
    with pytest.raises(VerificationError, match="2 shards are not what the plan says") as error:
        verify.run(verify_spec(spec), PROGRESS)
    names = ["shard-00002.safetensors", "shard-00005.safetensors"]
    assert [one["shard"] for one in error.value.details["condemned"]] == names
    assert all("contradict" in one["reason"] for one in error.value.details["condemned"])
    assert condemned_files(spec) == names


def test_shards_with_more_bad_samples_than_allowed_are_made_anew(made: StepSpec, tmp_path: Path) -> None:
    spec = in_copied_store(made, tmp_path)
    change_shard(spec, 3, put("aux_states", 7, float("nan")))
    with pytest.raises(VerificationError, match="bad samples") as error:
        verify.run(verify_spec(spec), PROGRESS)
    (bad,) = error.value.details["bad_samples"]
    assert (bad["key"], bad["nonfinite"]) == (
        "sample-003",
        [{"capture_id": 2, "num_nan": 1, "num_inf": 0}],
    )
    assert condemned_files(spec) == ["shard-00003.safetensors"]


def test_a_sample_that_does_not_match_its_own_hash_condemns_its_shard(spec: StepSpec) -> None:
    """The file's hash is right, as of a fault of memory between hashing a sample and writing it."""
    store = LocalStore(spec.config.store_path)
    with store.writer(spec.outputs["capture"]) as writer:
        path = writer.folder / "shard-00002.safetensors"
        data = bytearray(path.read_bytes())
        data[ShardIndex.of_file(path).ranges(0).aux_states.start] ^= 1
        path.write_bytes(data)
        writer.record(file_entry(writer.folder, path, **writer.files[path.name].facts))
        writer.complete()
    with pytest.raises(VerificationError, match=r"shard-00002.*sample-002 does not match its hash"):
        verify.run(verify_spec(spec), PROGRESS)
    assert condemned_files(spec) == ["shard-00002.safetensors"]


def test_deep_finds_a_wrong_layer_in_any_shard_and_has_that_one_made_anew(
    made: StepSpec, tmp_path: Path
) -> None:
    shallow = in_copied_store(made, tmp_path, reference_samples=1)
    change_shard(shallow, 7, lambda sample: replace(sample, aux_states=sample.aux_states.flip(1)))
    assert verify.run(verify_spec(shallow), PROGRESS).agreement == 1.0
    deep = in_copied_store(shallow, tmp_path / "deep", reference_samples=1, deep=True)
    with pytest.raises(VerificationError, match=r"in the sample sample-007.*makes these shards anew"):
        verify.run(verify_spec(deep), PROGRESS)
    assert condemned_files(deep) == ["shard-00007.safetensors"]


def test_shards_that_are_all_wrong_in_the_same_way_are_not_made_again(spec: StepSpec) -> None:
    for index in range(NUM_SAMPLES):
        change_shard(spec, index, lambda sample: replace(sample, aux_states=sample.aux_states.flip(1)))
    with pytest.raises(VerificationError, match="use another engine version") as error:
        verify.run(verify_spec(spec), PROGRESS)
    assert error.value.details["condemned"] == []
    assert LocalStore(spec.config.store_path).is_intact(spec.outputs["capture"].ref)
