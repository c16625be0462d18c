"""A workspace's runs: which one is the latest, and how one ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.host.process_tree import ProcessId
from eagle3_core.host.run_folder import CONFIG_NAME, RunFolder, create_run_folder, find_run, list_runs

pytestmark = pytest.mark.orchestrator


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return parse_config({"name": "a", "target": {"model": "m"}, "workspace": str(tmp_path)})


def begun(config: RunConfig, run_id: str, second: float) -> RunFolder:
    run = create_run_folder(config, ("report",), run_id)
    os.utime(run.path / CONFIG_NAME, (second, second))
    return run


def test_the_latest_of_runs_that_began_in_one_second_is_the_one_that_began_last(config, tmp_path):
    begun(config, "20260101-000001-a-0000", 1.0)
    for run_id, second in (("ffff", 0.2), ("0000", 0.4), ("8888", 0.1)):
        begun(config, f"20260101-000000-a-{run_id}", second)
    assert [run.run_id[9:] for run in list_runs(tmp_path)] == [
        "000000-a-8888", "000000-a-ffff", "000000-a-0000", "000001-a-0000",
    ]  # fmt: skip
    begun(config, "20260101-000001-b-ffff", 0.9)
    assert find_run(tmp_path, "latest").run_id == "20260101-000001-a-0000"


def test_a_run_that_ends_while_it_is_looked_at_has_not_crashed(config, monkeypatch):
    run = create_run_folder(config, ("report",), "20260101-000000-a-0000")
    running = run.record()

    def end(process: ProcessId) -> bool:
        run.write(running.model_copy(update={"state": "completed"}))
        return True

    monkeypatch.setattr(ProcessId, "is_gone", end)
    assert run.record().state == "completed"
    monkeypatch.setattr(ProcessId, "is_gone", lambda process: True)
    run.write(running)
    assert run.record().state == "crashed"


@pytest.mark.parametrize("state", ["running", "paused"])
def test_the_stage_in_which_a_run_crashed_has_crashed_too_and_others_stay_as_they_are(
    config, monkeypatch, state
):
    run = create_run_folder(config, ("plan", "train", "report"), "20260101-000000-a-0000")
    run.update_stage("plan", state="completed", message="made")
    run.update_stage("train", state=state, message="waits for space")
    monkeypatch.setattr(ProcessId, "is_gone", lambda process: True)
    seen = [(stage.state, stage.message) for stage in run.record().stages]
    assert seen == [("completed", "made"), ("crashed", "the run's process is gone"), ("pending", "")]
    run.finish("crashed", "killed")
    monkeypatch.undo()
    assert [(stage.state, stage.message) for stage in run.record().stages] == seen
