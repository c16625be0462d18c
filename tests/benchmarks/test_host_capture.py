"""Engines of the host benchmark: planned, loaded at once, and measured whatever happens to others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host_capture, host_engines
from benchmarks.host_capture import find_targets, measure_wave, plan_groups
from benchmarks.host_engines import Engines
from benchmarks.host_parts import PartSpec
from benchmarks.host_signals import give
from eagle3_core.config import PROJECT_ROOT

pytestmark = pytest.mark.engine
MUCH = 1 << 40
LIMIT = 300.0


def start_odd_worker(spec: Path, mode: str, variables: Mapping[str, str]) -> Any:
    command = [sys.executable, "-m", "tests.benchmarks.odd_worker", str(spec), mode]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, cwd=PROJECT_ROOT, start_new_session=True, **pipes)


def spec_for(folder: Path, gpus: int, device: str = "cpu") -> PartSpec:
    devices = tuple(map(str, range(gpus))) if device == "cuda" else ()
    return PartSpec(
        name="capture",
        gpus=gpus,
        device=device,
        shape="tiny",
        target=None,
        folder=str(folder),
        devices=devices,
    )


def test_engines_that_fail_or_hang_do_not_keep_others_from_being_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def give_up_the_last_one(loads: Collection[Future[Any]], timeout: float) -> Any:
        assert 0 < timeout <= LIMIT
        deadline = time.monotonic() + LIMIT
        while sum(not load.done() for load in loads) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return wait(loads, timeout=0.5)

    monkeypatch.setattr(host_engines, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(host_capture, "wait", give_up_the_last_one)
    spec = spec_for(tmp_path / "part", 2, "cuda")
    groups = plan_groups(spec, find_targets(spec, tmp_path), MUCH)
    found: dict[str, Any] = {"seconds": {}, "capture": {}, "mla": {}}
    give("early-stages-over", spec.common_folder)
    failed = measure_wave(spec, groups, found, (start_odd_worker,), LIMIT)
    assert failed.keys() == {"capture, tensor parallel", "mla, replicas", "mla, tensor parallel"}
    assert "the engine is dead" in failed["capture, tensor parallel"]
    assert "no memory is left on the GPU" in failed["mla, replicas"]
    assert failed["mla, tensor parallel"].startswith("not loaded after")
    replicas = found["capture"]["replicas"]
    assert replicas["tokens_per_second"] == {
        "plain": {"1": 100.0},
        "capture": {"1": 100.0, "2": 200.0},
    }
    assert replicas["import_seconds"] == 1.0
    assert [(each["mode"], each["index"]) for each in replicas["processes"]] == [
        ("plain", 0), ("capture", 0), ("capture", 1)
    ]  # fmt: skip
    assert found["capture"]["tensor_parallel"]["tokens_per_second"] == {"plain": {"1": 100.0}}
    saved = json.loads(spec.figures_path.read_text())
    assert len(saved["capture"]["replicas"]["rounds"]) == 6
    assert saved["is_quiet"]


def test_figures_taken_beside_other_work_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_capture, "QUIET_SECONDS", 0.0)
    spec = spec_for(tmp_path / "part", 1)
    groups = plan_groups(spec, find_targets(spec, tmp_path), MUCH)[:1]
    found: dict[str, Any] = {"seconds": {}, "capture": {}}
    assert measure_wave(spec, groups, found, (start_odd_worker,), LIMIT) == {}
    assert not found["is_quiet"]


def start_that_fails(spec: Path, mode: str, variables: Mapping[str, str]) -> Any:
    return start_odd_worker(Path("/mla") / spec.relative_to("/"), mode, variables)


def start_that_heals(spec: Path, mode: str, variables: Mapping[str, str]) -> Any:
    return start_odd_worker(Path(str(spec).replace("/mla/", "/healed/")), mode, variables)


def start_without_a_server(*_: Any) -> Any:
    raise EOFError("nobody forks here")


def test_engines_that_cannot_be_forked_are_started_alone(tmp_path: Path):
    spec = spec_for(tmp_path / "part", 1)
    give("early-stages-over", spec.common_folder)
    groups = plan_groups(spec, find_targets(spec, tmp_path), MUCH)[:1]
    found: dict[str, Any] = {"seconds": {}, "capture": {}}
    assert measure_wave(spec, groups, found, (start_that_fails, start_odd_worker), LIMIT) == {}
    assert "no memory is left on the GPU" in found["failed"]["capture, replicas"]
    assert found["capture"]["replicas"]["tokens_per_second"]["plain"] == {"1": 100.0}
    again = measure_wave(spec, groups, found, (start_that_fails, start_odd_worker), 20.0)
    assert again.keys() == {"capture, replicas"}
    assert measure_wave(spec, groups, found, (start_without_a_server, start_odd_worker), LIMIT) == {}
    assert found["failed"] == {"capture, replicas": "not started (EOFError: nobody forks here)"}


def test_engines_that_did_not_load_beside_others_are_tried_again_alone(tmp_path: Path):
    spec = spec_for(tmp_path / "part", 1)
    give("early-stages-over", spec.common_folder)
    groups = plan_groups(spec, find_targets(spec, tmp_path), MUCH)
    found: dict[str, Any] = {"seconds": {}, "capture": {}, "mla": {}}
    again = []

    def start(*arguments: Any) -> Any:
        again.append(arguments)
        return start_that_heals(*arguments)

    assert measure_wave(spec, groups, found, (start_odd_worker, start), LIMIT) == {}
    assert found["failed"].keys() == {"mla, replicas"}
    assert len(again) == 2, "the engines of one group, one for each mode"
    for part in ("capture", "mla"):
        assert found[part]["replicas"]["tokens_per_second"]["capture"] == {"1": 100.0}


def test_rounds_are_as_long_as_the_free_space_allows(tmp_path: Path):
    spec = spec_for(tmp_path, 2)
    targets = find_targets(spec, tmp_path)
    assert {(group.part, group.name, group.num_capturing) for group in plan_groups(spec, targets, MUCH)} == {
        ("capture", "replicas", 2), ("capture", "tensor_parallel", 1),
        ("mla", "replicas", 2), ("mla", "tensor_parallel", 1),
    }  # fmt: skip
    of_a_prompt = 256 * 4 * 2 * 128
    few = plan_groups(spec, targets, int(3 * of_a_prompt * 5 / host_capture.FOLDER_SHARE) + 1)
    assert {group.options.num_prompts for group in few if group.part == "capture"} == {5}
    assert [group.name for group in plan_groups(spec_for(tmp_path, 1), targets, MUCH)] == ["replicas"] * 2


def test_all_engines_of_a_gpu_have_a_cache_of_given_size(tmp_path: Path):
    spec = spec_for(tmp_path / "part", 2, "cuda")
    group = plan_groups(spec, find_targets(spec, tmp_path), MUCH)[0]
    Engines(group, tmp_path / "engines", spec.devices)
    written = json.loads((tmp_path / "engines" / "engine-1" / "spec.json").read_text())
    assert written["config"]["engine"]["gpu_kv_cache_gib"] == 8.0
