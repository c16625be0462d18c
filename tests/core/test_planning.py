"""What a run will make, decided before anything starts."""

from __future__ import annotations

import pytest

from eagle3_core.errors import MissingInputError, TargetError
from eagle3_core.host.run_folder import create_run_folder
from eagle3_core.pipeline import run_stage
from eagle3_core.planning import plan_run
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
        MissingInputError,
        match=r"stage train needs dataset/.*run the stage prepare .*--stages prepare,extract,verify,train`",
    ):
        plan.inputs("train")


def test_all_ids_are_known_once_the_dataset_exists(tmp_path):
    config = stand_in_config(tmp_path)
    prepare(config)
    plan = plan_run(config)
    assert list(plan.artifacts) == [
        *FIRST, "capture", "verification", "labels", "checkpoint", "export", "benchmark",
    ]  # fmt: skip
    assert plan.inputs("extract") == {"dataset": plan.artifacts["dataset"].ref}
    with pytest.raises(MissingInputError, match="run the stage extract first"):
        plan.inputs("verify")


def test_stages_need_in_the_store_only_what_none_of_them_makes(tmp_path):
    config = stand_in_config(tmp_path)
    plan_run(config).check_inputs(["prepare", "train"])  # what the capture's id will be is not known yet
    prepare(config)
    plan = plan_run(config)
    plan.check_inputs(["benchmark", "extract", "verify", "train", "export"])
    for stages in (["verify", "train"], ["prepare", "train"]):
        with pytest.raises(MissingInputError, match=r"needs capture/.* run the stage extract first"):
            plan.check_inputs(stages)


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
