"""Stages on a full disk and in a read-only folder: one clear line, and the run goes on when it is mended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.config import RunConfig
from eagle3_core.contracts import ProgressEvent
from eagle3_core.host.run_folder import RunFolder, StageRecord, create_run_folder
from eagle3_core.pipeline import StageError, run_stage
from eagle3_core.planning import plan_run
from eagle3_core.run_space import RunSpace, release_space
from eagle3_core.stage_run import Callbacks, StageOutcome
from eagle3_core.store import disk
from eagle3_core.store.reserve import Reservations
from tests.disks import SmallDisk, small_disk
from tests.doubles.profile import stand_in_config
from tests.waiting import wait_for

pytestmark = pytest.mark.orchestrator
KIB = 1 << 10
STAGES = ("plan", "prepare", "extract", "verify", "train", "export", "benchmark", "cleanup", "report")


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 512 * KIB) as mounted:
        yield mounted


def make_run(folder: Path, store: Path, **limits: Any) -> RunConfig:
    config = stand_in_config(folder, store=str(store), limits={"check_disk": False, **limits})
    create_run_folder(config, STAGES, "r")
    return config


def record(config: RunConfig, stage: Any) -> StageRecord:
    found = RunFolder(config.workspace_path / "runs" / "r").record().stage(stage)
    assert found is not None
    return found


def test_a_full_disk_pauses_the_stage_its_record_says_so_and_it_goes_on(
    tmp_path: Path, small: SmallDisk
) -> None:
    config = make_run(tmp_path, small.path / "store")
    run_stage("prepare", config, "r")
    small.fill()
    events: list[ProgressEvent] = []
    outcomes: list[StageOutcome] = []
    callbacks = Callbacks(on_progress=events.append)
    thread = threading.Thread(target=lambda: outcomes.append(run_stage("extract", config, "r", callbacks)))
    thread.start()
    wait_for(lambda: record(config, "extract").state == "paused")
    assert record(config, "extract").message.startswith("paused: no space: 0 bytes free on ")
    wait_for(lambda: events and events[-1].is_paused)
    small.free()
    thread.join(120)
    assert not events[-1].is_paused
    assert record(config, "extract").state == "completed"
    assert outcomes[0].result["num_new_shards"] == 4


@pytest.mark.parametrize("stage", ["prepare", "export"])
def test_a_stage_waits_before_it_begins_what_does_not_fit(
    tmp_path: Path, small: SmallDisk, stage: Any
) -> None:
    config = make_run(tmp_path, small.path / "store")
    for earlier in STAGES[1 : STAGES.index(stage)]:
        run_stage(earlier, config, "r")  # type: ignore[arg-type]
    small.fill()
    thread = threading.Thread(target=run_stage, args=(stage, config, "r"))
    thread.start()
    wait_for(lambda: record(config, stage).state == "paused")
    assert f"needed above the reserve" in record(config, stage).message  # noqa: F541
    small.free()
    thread.join(120)
    assert record(config, stage).state == "completed"


def test_by_policy_a_full_disk_fails_the_stage_with_one_line_and_no_second_attempt(
    tmp_path: Path, small: SmallDisk
) -> None:
    config = make_run(tmp_path, small.path / "store", on_full_disk="fail")
    run_stage("prepare", config, "r")
    small.fill()
    with pytest.raises(StageError, match=r"^stage extract failed: no space: ") as caught:
        run_stage("extract", config, "r")
    assert not caught.value.may_pass_next_time
    failed = record(config, "extract")
    assert (failed.state, failed.message.count("\n")) == ("failed", 0)
    small.free()
    run_stage("extract", config, "r")
    assert record(config, "extract").state == "completed"


def test_a_read_only_folder_is_one_clear_line_and_the_run_goes_on_when_it_is_mended(
    tmp_path: Path, small: SmallDisk
) -> None:
    config = make_run(tmp_path, small.path / "store")
    run_stage("prepare", config, "r")
    small.make_read_only()
    with pytest.raises(StageError, match=r"^stage extract failed: .*Read-only file system") as caught:
        run_stage("extract", config, "r")
    assert str(small.path) in str(caught.value)
    assert "Traceback" not in str(caught.value)
    small.make_read_only(False)
    run_stage("extract", config, "r")
    assert record(config, "extract").state == "completed"


def test_a_full_workspace_costs_lines_of_a_log_and_no_run(tmp_path: Path, small: SmallDisk) -> None:
    places = {"workspace": str(small.path / "workspace"), "store": str(tmp_path / "store")}
    config = stand_in_config(tmp_path, {"step": "extract", "kind": "flood"}, **places)
    create_run_folder(config, STAGES, "r")
    lines: list[str] = []

    def fill(line: str) -> None:
        lines.append(line)
        if line == "line 10":
            small.fill()

    def make_room(event: ProgressEvent) -> None:
        if event.done == event.total or event.is_paused:
            small.free()

    run_stage("prepare", config, "r")
    run_stage("extract", config, "r", Callbacks(on_line=fill, on_progress=make_room))
    assert record(config, "extract").state == "completed"
    assert "WARNING the step's log cannot be written (No space left on device); it goes on" in lines
    assert {f"line {number}" for number in range(5000)} <= set(lines)
    log = RunFolder(config.workspace_path / "runs" / "r").log_path("extract").read_text()
    assert " lines could not be written here" in log


def test_the_plan_checks_settings_and_refuses_what_does_not_fit(tmp_path: Path, small: SmallDisk) -> None:
    refused = stand_in_config(tmp_path, store=str(small.path / "store"), limits={"min_free_disk_gib": 1})
    create_run_folder(refused, STAGES, "r")
    with pytest.raises(StageError, match=r"stage plan failed: the run does not fit on .*disk: it needs"):
        run_stage("plan", refused, "r")
    unfit = stand_in_config(tmp_path, draft={"vocab_size": 1000})
    with pytest.raises(StageError, match=r"draft\.vocab_size is 1,000; expected at most the target's 64"):
        run_stage("plan", unfit, "r")


def test_the_plan_reserves_and_the_end_of_the_run_gives_it_back(tmp_path: Path) -> None:
    config = make_run(tmp_path, tmp_path / "store")
    run_stage("plan", config, "r")
    reserved = Reservations(None).find("r")
    assert reserved is not None
    (needs,) = reserved.needs.values()
    assert {"capture", "checkpoint", "logs and report"} <= needs.keys()
    release_space(config, "r")
    assert Reservations(None).find("r") is None


def test_what_lies_on_the_disk_already_is_not_reserved_again(tmp_path: Path) -> None:
    config = make_run(tmp_path, tmp_path / "store")
    run_stage("prepare", config, "r")
    plan = plan_run(config)
    from eagle3_core.estimate.run import estimate_run

    space = RunSpace(config, RunFolder(config.workspace_path / "runs" / "r"), "extract", None, None)
    space.reserve(estimate_run(plan, ["extract"], "r"))
    before = Reservations(None).find("r")
    folder = plan.store.folder(plan.artifacts["capture"].ref)
    folder.mkdir(parents=True)
    (folder / "shard").write_bytes(b"x" * 1000)
    space._last_update = -1e9
    space.tick()
    after = Reservations(None).find("r")
    assert before is not None
    assert after is not None
    (one,), (two,) = before.needs.values(), after.needs.values()
    assert sum(one.values()) - sum(two.values()) == 1000
