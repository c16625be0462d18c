"""The flow on a real Prefect server, over the stand-in engine."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from uuid import UUID

import pytest

from eagle3_core.config import PROJECT_ROOT, STAGES
from eagle3_core.errors import EXIT_INTERRUPTED, EXIT_STEP_FAILED
from eagle3_core.host.run_folder import find_run
from eagle3_core.pipeline import StageError
from eagle3_core.planning import MAKING_STAGE
from tests.doubles.profile import stand_in_config, stand_in_profile
from tests.host.test_process import living_steps, wait_for

pytestmark = pytest.mark.orchestrator

RUN_SECONDS = 250.0
"""More than a run from the command line takes, the stand-in's sleep for ever not counted."""
STEP_STAGES = ("prepare", "extract", "verify", "train", "export", "benchmark")


@pytest.fixture
def client(api):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def run_flow(config, stages=STAGES):
    from flows.eagle3 import eagle3

    return eagle3(config=config, stages=list(stages), return_state=True)


def record_of(config):
    return find_run(config.workspace_path, "latest").record()


def flow_run_of(client, config):
    return client.read_flow_run(UUID(record_of(config).flow_run_id))


def task_runs(client, flow_run_id):
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    flush()
    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    return {run.name: run for run in client.read_task_runs(flow_run_filter=chosen)}


def task_run(client, flow_run_id, name):
    """One of them; the server shows it some time after it has begun."""
    assert wait_for(lambda: name in task_runs(client, flow_run_id))
    return task_runs(client, flow_run_id)[name]


def task_log(client, task_run_id):
    """The newest lines of a task's log."""
    from prefect.client.schemas.filters import LogFilter, LogFilterTaskRunId
    from prefect.client.schemas.sorting import LogSort

    flush()
    chosen = LogFilter(task_run_id=LogFilterTaskRunId(any_=[task_run_id]))
    return [entry.message for entry in client.read_logs(chosen, limit=200, sort=LogSort.TIMESTAMP_DESC)]


def flush():
    from flows.launch import send_what_is_queued

    send_what_is_queued()


def test_a_run_is_visible_in_the_api_and_in_its_folder(tmp_path, client):
    config = stand_in_config(tmp_path)
    state = run_flow(config)
    assert state.is_completed()
    record = record_of(config)
    assert record.state == "completed"
    assert [stage.state for stage in record.stages] == ["completed"] * len(STAGES)
    assert record.run_id.endswith(f"-stand-in-{record.flow_run_id[:4]}")
    folder = config.workspace_path / "runs" / record.run_id
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["benchmark"]["acceptance_length"] == 1.5
    assert (folder / "report.html").is_file()
    flow_run_id = UUID(record.flow_run_id)
    assert wait_for(lambda: set(task_runs(client, flow_run_id)) == set(STAGES))
    train = task_run(client, flow_run_id, "train")
    assert wait_for(lambda: "INFO stand-in train begins" in task_log(client, train.id))


def artifacts_of(client, config):
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_of(client, config).id]))
    return {artifact.key: artifact for artifact in client.read_artifacts(artifact_filter=chosen)}


def test_each_stage_has_an_artifact_each_step_its_progress_and_each_manifest_a_page(tmp_path, client):
    config = stand_in_config(tmp_path, retention={"keep_last_captures": 1})
    run_flow(config)
    artifacts = artifacts_of(client, config)
    assert set(artifacts) == (
        {f"eagle3-{stage}" for stage in STAGES}
        | {f"eagle3-{stage}-progress" for stage in STEP_STAGES}
        | {f"eagle3-manifest-{kind}" for kind in MAKING_STAGE}
        | {f"eagle3-{stage}-table" for stage in ("plan", "verify", "cleanup")}
    )
    assert artifacts["eagle3-train-progress"].data == 100.0
    capture = record_of(config).stage("extract").artifacts[0]
    assert f"`{capture}`" in artifacts["eagle3-extract"].data
    assert f"## {capture}\n" in artifacts["eagle3-manifest-capture"].data
    assert str(capture) in artifacts["eagle3-cleanup-table"].data


def test_bad_states_are_a_table_also_where_they_end_the_run(tmp_path, client):
    config = stand_in_config(tmp_path, fault={"step": "verify", "kind": "bad_states"})
    assert run_flow(config).is_failed()
    table = json.loads(artifacts_of(client, config)["eagle3-verify-table"].data)
    assert [(row["what"], row["sample or layer"]) for row in table] == [("bad sample", "k7")]
    assert record_of(config).state == "failed"
    assert not list((config.store_path / "uses").glob("*.json"))


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    """What one test made, the next one reuses."""
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize("stage", STEP_STAGES)
def test_a_failing_stage_fails_the_run_and_ends_it_there(shared_folder, client, stage):
    config = stand_in_config(shared_folder, {"step": stage, "kind": "exit"})
    state = run_flow(config)
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, StageError)
    assert str(error).startswith(f"stage {stage} failed: step {stage} ended with exit code 1")
    record = record_of(config)
    states = [entry.state for entry in record.stages]
    at = STAGES.index(stage)
    assert states == ["completed"] * at + ["failed"] + ["pending"] * (len(STAGES) - at - 1)
    assert (record.state, record.message) == ("failed", str(error))
    assert flow_run_of(client, config).state.is_failed()
    summary = json.loads((config.workspace_path / "runs" / record.run_id / "summary.json").read_text())
    assert summary["state"] == "failed"


def test_the_last_lines_of_a_failed_step_are_in_its_task_log(tmp_path, client):
    config = stand_in_config(tmp_path, {"step": "train", "kind": "exit"})
    run_flow(config)
    train = task_run(client, flow_run_of(client, config).id, "train")
    assert wait_for(lambda: "token-before-exit" in task_log(client, train.id))


def test_a_failed_step_is_tried_again_as_often_as_configured(tmp_path, api):
    fault = {"step": "prepare", "kind": "exit"}
    config = stand_in_config(tmp_path, fault, limits={"step_retries": 1})
    run_flow(config, ["prepare"])
    assert record_of(config).stage("prepare").attempts == 2


def test_an_error_in_the_data_is_not_tried_again(tmp_path, api):
    fault = {"step": "prepare", "kind": "user_error"}
    config = stand_in_config(tmp_path, fault, limits={"step_retries": 1})
    run_flow(config, ["prepare"])
    assert record_of(config).stage("prepare").attempts == 1


def test_changed_prompts_make_prepare_run_again(tmp_path, api):
    config = stand_in_config(tmp_path)
    run_flow(config, ["prepare"])
    run_flow(config, ["prepare"])
    assert record_of(config).stage("prepare").reused
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("What is 3?", "What is 33?"))
    run_flow(config, ["prepare"])
    assert not record_of(config).stage("prepare").reused


def test_a_flood_of_lines_is_thinned_in_the_api_and_counted(tmp_path, client):
    config = stand_in_config(tmp_path, {"step": "prepare", "kind": "flood"})
    run_flow(config, ["prepare"])
    prepare = task_run(client, flow_run_of(client, config).id, "prepare")
    assert wait_for(lambda: any("were left out" in line for line in task_log(client, prepare.id)))
    log = find_run(config.workspace_path, "latest").log_path("prepare").read_text()
    assert "line 4999\n" in log


def start_cli(profile, *arguments):
    command = [sys.executable, "-m", "flows.cli", "run", str(profile), *arguments]
    return subprocess.Popen(
        command, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def hanging_run(tmp_path):
    """A run from the command line whose extract hangs, with a grandchild."""
    profile = stand_in_profile(tmp_path, {"step": "extract", "kind": "hang"})
    process = start_cli(profile, "--stages", "prepare,extract,train")
    log = lambda: [path.read_text() for path in tmp_path.glob("workspace/runs/*/logs/extract.log")]  # noqa: E731
    assert wait_for(lambda: any("grandchild-ready" in text for text in log()), RUN_SECONDS)
    assert len(living_steps(process.pid)) >= 2
    return process


def test_a_failed_run_from_the_command_line_ends_in_one_line(tmp_path, api, eagle3_command):
    profile = stand_in_profile(tmp_path, {"step": "prepare", "kind": "bug"})
    done = eagle3_command("run", str(profile))
    assert done.returncode == EXIT_STEP_FAILED
    log = next(tmp_path.glob("workspace/runs/*/logs/prepare.log"))
    assert done.stderr == (
        f"eagle3: stage prepare failed: RuntimeError: a bug in the stand-in; full log: {log}\n"
    )
    assert "Traceback" not in done.stdout.replace("Traceback (most recent call last)", "")
    assert f"log of prepare: {log}\n" in done.stdout
    assert done.stdout.endswith(f"\nreport: {log.parent.parent / 'report.html'}\n")


def test_a_draft_below_the_limit_fails_the_run_and_its_report_is_named(tmp_path, api, eagle3_command):
    profile = stand_in_profile(tmp_path, benchmark={"min_acceptance_length": 3})
    done = eagle3_command("run", str(profile))
    assert "at least benchmark.min_acceptance_length = 3" in done.stderr
    run = find_run(tmp_path / "workspace", "latest")
    assert f"log of benchmark: {run.log_path('benchmark')}\n" in done.stdout
    assert done.stdout.endswith(f"\nreport: {run.path / 'report.html'}\n")


def test_a_run_cancelled_through_the_api_ends_its_step_and_starts_nothing_more(tmp_path, client):
    process = hanging_run(tmp_path)
    record = find_run(tmp_path / "workspace", "latest").record()
    flow_run_id = UUID(record.flow_run_id)
    assert record.run_id in process.stdout.readline()
    command = re.fullmatch(r"Ctrl-C cancels it, and so does `prefect (.+)`\n", process.stdout.readline())
    subprocess.run([sys.executable, "-m", "prefect", *command[1].split()], check=True, capture_output=True)
    assert process.wait(timeout=RUN_SECONDS) == EXIT_INTERRUPTED
    assert living_steps(process.pid) == []
    assert client.read_flow_run(flow_run_id).state.is_cancelled()
    ended = find_run(tmp_path / "workspace", "latest").record()
    assert [stage.state for stage in ended.stages] == ["completed", "cancelled", "pending"]
    assert ended.state == "cancelled"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_too(tmp_path, api, number):
    process = hanging_run(tmp_path)
    process.send_signal(number)
    assert process.wait(timeout=RUN_SECONDS) != 0
    assert wait_for(lambda: living_steps(process.pid) == [])


def test_a_killed_run_leaves_nothing_behind_and_the_next_one_says_that_it_crashed(tmp_path, client):
    process = hanging_run(tmp_path)
    process.kill()
    process.wait()
    assert wait_for(lambda: living_steps(process.pid) == [])
    crashed = find_run(tmp_path / "workspace", "latest").record()
    assert (crashed.state, crashed.stages[1].state) == ("crashed", "crashed")
    state = client.read_flow_run(UUID(crashed.flow_run_id)).state
    assert state.is_running(), "nobody has told the API yet"
    run_flow(stand_in_config(tmp_path), ["prepare"])
    assert client.read_flow_run(UUID(crashed.flow_run_id)).state.is_crashed()


def test_a_run_starts_its_own_server_where_no_api_is_configured(tmp_path, eagle3_command):
    home = tmp_path / "home"
    arguments = ("run", str(stand_in_profile(tmp_path)), "--stages", "prepare")
    done = eagle3_command(*arguments, PREFECT_HOME=str(home), PREFECT_API_URL="")
    assert (done.returncode, done.stderr) == (0, "")
    assert "prepare" in done.stdout
    assert re.search(r"^Ctrl-C cancels it, and so does `kill \d+` from elsewhere;", done.stdout, re.MULTILINE)
    assert (home / "prefect.db").is_file()


def test_a_run_cancelled_before_a_stage_begins_does_not_begin_it(tmp_path, api, monkeypatch):
    from tasks.reporting import RunCancelled, StageReporter

    def cancelled(reporter):
        raise RunCancelled("the run was cancelled")

    monkeypatch.setattr(StageReporter, "tick", cancelled)
    config = stand_in_config(tmp_path)
    assert run_flow(config, ["cleanup", "report"]).is_cancelled()
    record = record_of(config)
    assert record.state == "cancelled"
    assert [stage.state for stage in record.stages] == ["pending", "pending"]


def test_a_report_that_fails_does_not_hide_why_the_run_failed(tmp_path, api, monkeypatch):
    import flows.eagle3

    def broken(folder, store):
        raise ZeroDivisionError

    monkeypatch.setattr(flows.eagle3, "write_report", broken)
    state = run_flow(stand_in_config(tmp_path), ["extract"])
    error = state.result(raise_on_failure=False)
    assert "stage extract needs dataset/" in str(error).replace("the stage", "stage")
