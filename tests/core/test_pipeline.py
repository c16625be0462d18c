"""Stages: reuse, repair, refusal and the run's record, over the stand-in engine."""

from __future__ import annotations

import contextlib
import shutil

import pytest

from eagle3_core import making
from eagle3_core.contracts import ExtractResult, Rejection
from eagle3_core.errors import EXIT_STEP_FAILED, StepError
from eagle3_core.host.run_folder import RunFolder, create_run_folder, new_run_id
from eagle3_core.pipeline import StageError, run_stage
from eagle3_core.planning import STAGE_INPUTS, STAGE_OUTPUTS, plan_run
from eagle3_core.sections import RetentionConfig
from eagle3_core.stage_run import Callbacks, StageOutcome
from eagle3_core.store.collect import collect_garbage
from eagle3_core.store.files import file_entry, write_atomic
from eagle3_core.store.locks import folder_lock
from eagle3_core.store.open import open_store
from tests.doubles.profile import stand_in_config
from tests.store.artifacts import add_run

STEPS = ("prepare", "extract", "verify", "train", "export", "benchmark")
STAGES = (*STEPS, "plan", "cleanup", "report")

pytestmark = pytest.mark.orchestrator


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A store in which the first three steps have made what they make."""
    config = stand_in_config(tmp_path_factory.mktemp("made"))
    create_run_folder(config, STAGES, "r")
    run_all(config, ("prepare", "extract", "verify"))
    return config.store_path


@pytest.fixture
def config(tmp_path):
    config = stand_in_config(tmp_path)
    create_run_folder(config, STAGES, "r")
    return config


@pytest.fixture
def verified(made, config):
    """The same configuration over a copy of that store, whose stages have been run here too."""
    shutil.copytree(made, config.store_path)
    outcomes = run_all(config, ("prepare", "extract", "verify"))
    assert all(outcome.reused for outcome in outcomes.values())
    return config


def run_all(config, stages=STEPS):
    return {stage: run_stage(stage, config, "r") for stage in stages}


def record(config, stage):
    return RunFolder(config.workspace_path / "runs" / "r").record().stage(stage)


def capture_folder(config):
    plan = plan_run(config)
    return plan.store.folder(plan.artifacts["capture"].ref)


def test_a_second_run_reuses_everything_and_starts_no_step(config):
    first = run_all(config)
    logs = config.workspace_path / "runs" / "r" / "logs"
    sizes = {path: path.stat().st_size for path in logs.glob("*.log")}
    second = run_all(config)
    assert not any(outcome.reused for outcome in first.values())
    assert all(outcome.reused for outcome in second.values())
    assert {stage: o.result for stage, o in first.items()} == {stage: o.result for stage, o in second.items()}
    assert {path: path.stat().st_size for path in logs.glob("*.log")} == sizes


def test_a_missing_shard_alone_is_made_again(verified):
    folder = capture_folder(verified)
    shards = sorted(folder.glob("shard-*"))
    times = {shard: shard.stat().st_mtime_ns for shard in shards}
    shards[1].unlink()
    outcome = run_stage("extract", verified, "r")
    assert (outcome.reused, outcome.message.endswith("; 1 shard made, 3 kept")) == (False, True)
    log = RunFolder(verified.workspace_path / "runs" / "r").log_path("extract").read_text()
    assert f" W eagle3_core.store.local: {shards[1]} is missing: made again\n" in log
    assert [s for s in shards if s.stat().st_mtime_ns != times[s]] == [shards[1]]


def damage(shard, how):
    content = shard.read_bytes()
    changed = {
        "cut": content[:-1],
        "empty": b"",
        "longer": content + b"x",
        "flipped": content[:5] + bytes([content[5] ^ 1]) + content[6:],
    }
    shard.write_bytes(changed[how])


@pytest.mark.parametrize("how", ["cut", "empty", "longer", "flipped"])
def test_verify_names_a_damaged_shard_and_extract_remakes_only_it(verified, how):
    shards = sorted(capture_folder(verified).glob("shard-*"))
    damage(shards[2], how)
    with pytest.raises(StageError, match=r"1 of 4 shards .* are damaged: .*shard-00002") as caught:
        run_stage("verify", verified, "r")
    assert not caught.value.may_pass_next_time
    assert run_stage("extract", verified, "r").result["num_new_shards"] == 1
    assert run_stage("verify", verified, "r").reused


DAMAGES = {
    "the last byte cut": (lambda content: content[:-1], "bytes, its manifest says"),
    "cut to four bytes": (lambda content: content[:4], "has 4 bytes, its manifest says"),
    "emptied": (lambda content: b"", "has 0 bytes, its manifest says"),
    "a byte more": (lambda content: content + b"x", "bytes, its manifest says"),
    "a bit flipped": (lambda content: content[:5] + bytes([content[5] ^ 1]) + content[6:], "match its hash"),
}


def test_five_kinds_of_damage_are_listed_with_their_reasons_and_good_shards_are_left_alone(verified):
    plan = plan_run(verified)
    with plan.store.writer(plan.artifacts["capture"]) as writer:
        for index in range(4, 9):
            path = writer.folder / f"shard-{index:05d}.safetensors"
            path.write_bytes(bytes(range(100)))
            writer.record(file_entry(writer.folder, path))
        writer.complete()
    run_stage("verify", verified, "r")
    shards = sorted(capture_folder(verified).glob("shard-*"))
    before = {shard: (shard.stat().st_mtime_ns, shard.read_bytes()) for shard in shards}
    damaged = dict(zip(shards[1:6], DAMAGES.values(), strict=True))
    for shard, (change, _) in damaged.items():
        shard.write_bytes(change(shard.read_bytes()))
    found = plan.store.problems(plan.manifest("capture"))
    assert list(found) == [shard.name for shard in damaged]
    for shard, (_, reason) in damaged.items():
        assert reason in found[shard.name]
    for stage, message in (("verify", "5 of 9 shards .* are damaged"), ("train", "cannot use capture/")):
        with pytest.raises(StageError, match=message) as caught:
            run_stage(stage, verified, "r")
        assert caught.value.exit_code != 0
        assert all(shard.name in str(caught.value) for shard in damaged)
    good = [shard for shard in shards if shard not in damaged]
    assert all((shard.stat().st_mtime_ns, shard.read_bytes()) == before[shard] for shard in good)


def test_train_refuses_damaged_states(verified):
    damage(sorted(capture_folder(verified).glob("shard-*"))[0], "flipped")
    with pytest.raises(StageError, match=r"stage train cannot use capture/.*shard-00000"):
        run_stage("train", verified, "r")


def test_a_stage_without_its_inputs_names_the_stage_to_run_first(config):
    run_all(config, ("prepare", "extract"))
    with pytest.raises(StageError, match=r"stage train needs verification/.*run the stage verify first"):
        run_stage("train", config, "r")


def test_a_removed_store_is_noticed_by_the_next_stage(config):
    run_all(config, ("prepare",))
    shutil.rmtree(config.store_path)
    with pytest.raises(StageError, match=r"stage extract needs dataset/.*run the stage prepare first"):
        run_stage("extract", config, "r")


def test_a_removed_run_folder_is_noticed_by_the_next_stage(config):
    run_all(config, ("prepare",))
    shutil.rmtree(config.workspace_path / "runs")
    with pytest.raises(StageError, match=r"was removed .*start the run again"):
        run_stage("extract", config, "r")


def test_a_failed_step_is_recorded_with_its_first_cause(tmp_path):
    config = stand_in_config(tmp_path, {"step": "extract", "kind": "exit"})
    create_run_folder(config, STAGES, "r")
    run_stage("prepare", config, "r")
    with pytest.raises(StageError) as caught:
        run_stage("extract", config, "r")
    assert isinstance(caught.value.cause, StepError)
    assert caught.value.exit_code == EXIT_STEP_FAILED
    assert caught.value.may_pass_next_time
    failed = record(config, "extract")
    assert failed.state == "failed"
    assert failed.message.startswith("stage extract failed: step extract ended with exit code 1")
    assert failed.log == "logs/extract.log"
    assert record(config, "prepare").state == "completed"


def test_a_second_signal_does_not_leave_a_cancelled_stage_that_seems_to_run(config, monkeypatch):
    usual, signals = RunFolder.update_stage, [KeyboardInterrupt]

    def interrupted(run, stage, **changes):
        if changes["state"] == "cancelled" and signals:
            raise signals.pop()
        return usual(run, stage, **changes)

    def cancel():
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "update_stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_stage("prepare", config, "r", Callbacks(on_tick=cancel))
    assert not signals
    assert record(config, "prepare").state == "cancelled"


def test_an_error_in_the_data_is_not_worth_a_second_attempt(tmp_path):
    config = stand_in_config(tmp_path, {"step": "prepare", "kind": "user_error"})
    create_run_folder(config, STAGES, "r")
    with pytest.raises(StageError) as caught:
        run_stage("prepare", config, "r")
    assert not caught.value.may_pass_next_time


def test_a_limit_is_applied_to_a_reused_benchmark(tmp_path):
    config = stand_in_config(tmp_path)
    create_run_folder(config, STAGES, "r")
    run_all(config)
    strict = stand_in_config(tmp_path, benchmark={"min_acceptance_length": 1.6})
    with pytest.raises(StageError, match=r"acceptance length is 1\.500"):
        run_stage("benchmark", strict, "r")
    failed = record(config, "benchmark")
    assert (failed.state, [ref.kind for ref in failed.artifacts]) == ("failed", ["benchmark"])


def test_cleanup_removes_what_an_interrupted_writer_left_and_nothing_else(config):
    run_all(config, ("prepare", "extract"))
    folder = capture_folder(config)
    before = {path.name for path in folder.iterdir()}
    (folder / ".tmp-shard-00009.safetensors.1").write_bytes(b"x" * 100)
    outcome = run_stage("cleanup", config, "r")
    assert outcome.details["bytes"] == 100
    assert {path.name for path in folder.iterdir()} == before


def test_cleanup_applies_the_policies_and_spares_what_the_run_itself_uses(tmp_path):
    config = stand_in_config(tmp_path, retention={"older_than_days": 14, "unreferenced": True})
    store, run_id = open_store(config), new_run_id("stand-in")
    create_run_folder(config, STAGES, run_id)
    old = add_run(store, "a", age_days=30, profile="stand-in", upto="verification")
    newer = add_run(store, "b", age_days=20, profile="stand-in", upto="verification")
    for stage in ("prepare", "extract"):
        run_stage(stage, config, run_id)
    outcome = run_stage("cleanup", config, run_id)
    assert "to the trash" in outcome.message
    assert old.capture not in store.refs()
    assert newer.capture in store.refs()  # the run's own capture is not verified yet
    run_stage("verify", config, run_id)
    run_stage("cleanup", config, run_id)
    assert newer.capture not in store.refs()
    assert run_stage("extract", config, run_id).reused


def test_retention_that_cannot_be_applied_does_not_fail_the_run(tmp_path, caplog):
    config = stand_in_config(tmp_path, retention={"unreferenced": True})
    create_run_folder(config, STAGES, "r")
    run_stage("prepare", config, "r")
    (config.store_path / "uses" / "other.json").write_text("{")
    outcome = run_stage("cleanup", config, "r")
    assert "were not applied" in outcome.message
    assert "uses/other.json" in outcome.details["retention_problem"]
    assert "uses/other.json" in caplog.text


def test_an_artifact_in_the_trash_is_made_anew_and_that_is_said(config, caplog):
    run_all(config, ("prepare", "extract"))
    plan = plan_run(config)
    ref = plan.artifacts["capture"].ref
    collect_garbage(plan.store, RetentionConfig(), forced={ref})
    assert not run_stage("extract", config, "r").reused
    assert f"{ref} is in the trash and is made anew: `eagle3 gc --restore {ref}`" in caplog.text


def test_every_input_is_an_output_of_an_earlier_stage():
    made: set[str] = set()
    for stage, outputs in STAGE_OUTPUTS.items():
        assert set(STAGE_INPUTS[stage]) <= made
        made |= set(outputs)


def test_a_damaged_dataset_does_not_stop_the_plan_and_is_made_again(config):
    run_all(config, ("prepare",))
    plan = plan_run(config)
    file = plan.store.folder(plan.artifacts["dataset"].ref) / "samples.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    run_stage("plan", config, "r")
    assert not run_stage("prepare", config, "r").reused
    assert file.read_bytes() == whole


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_answers_behind_an_intact_dataset_are_not_needed(verified, how):
    plan = plan_run(verified)
    folder = plan.store.folder(plan.artifacts["conversations"].ref)
    if how == "removed":
        shutil.rmtree(folder)
    else:
        (folder / "conversations.jsonl").write_text("")
    assert run_stage("prepare", verified, "r").reused
    assert run_stage("extract", verified, "r").reused


def test_the_limit_on_rejected_prompts_is_applied_to_a_reused_dataset(config, tmp_path):
    run_all(config, ("prepare",))
    plan = plan_run(config)
    manifest = plan.manifest("vocabulary")
    result = manifest.facts["result"] | {
        "num_kept": 6,
        "rejected": [{"key": key, "reason": "too short"} for key in "ab"],
    }
    changed = manifest.model_copy(update={"facts": {"result": result}})
    (plan.store.folder(manifest.ref) / "manifest.json").write_text(changed.model_dump_json())
    assert run_stage("prepare", config, "r").reused
    strict = stand_in_config(tmp_path, data={"max_rejected_fraction": 0.1})
    with pytest.raises(StageError, match=r"2 of 8 conversations were rejected \(2 x too short\)"):
        run_stage("prepare", strict, "r")


def remake_a_shard_differently(config):
    """Another engine session may write other bytes under the same id."""
    plan = plan_run(config)
    capture = plan.artifacts["capture"]
    name = "shard-00001.safetensors"
    with plan.store.writer(capture) as writer:
        write_atomic(writer.folder / name, "other states")
        writer.record(file_entry(writer.folder, writer.folder / name))
        writer.complete()


def test_states_that_were_made_again_are_verified_again_before_they_are_trained_on(verified):
    remake_a_shard_differently(verified)
    with pytest.raises(StageError, match=r"verification/.* is older than .*run the stage verify first"):
        run_stage("train", verified, "r")
    assert not run_stage("verify", verified, "r").reused
    assert run_stage("verify", verified, "r").reused
    run_stage("train", verified, "r")


def test_a_secret_of_the_profile_is_not_written_into_the_run_folder(tmp_path):
    config = stand_in_config(tmp_path)
    environment = {"HF_TOKEN": "hf_4711472847", "VLLM_X": "plain-value"}
    config = config.model_copy(
        update={"engine": config.engine.model_copy(update={"environment": environment})}
    )
    run = create_run_folder(config, STAGES, "r")
    run_all(config, ("prepare",))
    run_stage("report", config, "r")
    texts = [path.read_text() for path in run.path.rglob("*") if path.is_file()]
    assert not [text for text in texts if "hf_4711472847" in text]
    assert [text for text in texts if "plain-value" in text]


def test_a_stage_waits_for_a_run_that_makes_the_same_and_takes_what_that_made(verified, tmp_path):
    run_stage("train", verified, "r")
    store, ref = open_store(verified), plan_run(verified).artifacts["checkpoint"].ref
    folder, aside = store.folder(ref), tmp_path / "aside"
    shutil.move(folder, aside)
    ticks, other = [], contextlib.ExitStack()
    other.enter_context(folder_lock(folder, run_id="other"))

    def tick():
        ticks.append(1)
        if len(ticks) == 2:
            shutil.copytree(aside, folder, dirs_exist_ok=True)
            other.close()

    outcome = run_stage("train", verified, "r", Callbacks(on_tick=tick))
    assert outcome.reused
    assert outcome.message.startswith("reused, hashes match: checkpoint/")
    assert len(ticks) >= 2


def test_a_training_that_went_on_or_stopped_early_says_so_where_the_stage_is_reported(verified, monkeypatch):
    outcome = run_stage("train", verified, "r")
    assert "step" not in outcome.message
    told = {"resumed_from_step": 1200, "early_stop": "stopped early at step 1,400: why"}
    made = outcome.model_copy(update={"result": outcome.result | told})
    monkeypatch.setattr(making, "make", lambda stage: lambda run: made)
    message = run_stage("train", verified, "r").message
    assert message == f"{outcome.message}; resumed at step 1,200; stopped early at step 1,400: why"
    made = made.model_copy(update={"result": made.result | {"num_planned_steps": 4000}})
    assert "; resumed at step 1,200 of 4,000; " in run_stage("train", verified, "r").message


def test_quarantined_samples_are_named_where_the_stage_is_reported(monkeypatch):
    result = ExtractResult(
        num_shards=1, num_new_shards=1, num_samples=7, num_tokens=60, bytes=10, captured_tokens=60,
        seconds=1.0, tokens_per_second=60.0, num_restarts=2,
        quarantined=[Rejection(key="q7", reason="killed vllm 1 twice")],
    )  # fmt: skip
    made = StageOutcome(stage="extract", message="made", result=result.model_dump(mode="json"))
    monkeypatch.setattr(making, "make", lambda stage: lambda run: made)
    outcome = making.extract(None)
    told = "1 shard made, 0 kept; 2 engines died and were replaced; 1 samples quarantined (q7)"
    assert outcome.message == f"made; {told}"
    assert outcome.details == {"quarantined": [{"key": "q7", "reason": "killed vllm 1 twice"}]}
