"""The host benchmark: limits of its parts, how they end, and what its table says."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import host, host_parts
from benchmarks.host_parts import PARTS, Part, PartOutcome, PartSpec, limit_of, part_environment, run_part
from benchmarks.host_signals import wait_for
from benchmarks.host_table import format_rows, rows_of
from eagle3_core.host import process

LIMIT = 600.0


def spec_for(folder: Path, name: str, **changes: Any) -> PartSpec:
    values: dict[str, Any] = {"name": name, "gpus": 2, "device": "cpu", "shape": "tiny", "devices": ()}
    values |= {"target": None, "folder": str(folder / name)}
    return PartSpec(**values | changes)


def outcome(name: str, figures: dict[str, Any], state: str = "done") -> PartOutcome:
    return PartOutcome(name=name, state=state, seconds=1.0, limit_seconds=2.0, figures=figures)


def test_a_part_gets_its_share_of_the_time_that_is_left():
    parts = [Part("a", "", 1), Part("b", "", 3), Part("c", "", 4)]
    assert limit_of("a", parts, 100.0) == pytest.approx(12.5)
    assert limit_of("b", parts[1:], 96.0) == pytest.approx(96.0 * 3 / 7)
    assert limit_of("c", parts[2:], 30.0) == pytest.approx(30.0)
    assert limit_of("c", parts[2:], -5.0) == 0.0


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for somebody to take note of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run(folder: Path, name: str, shown: list[str]) -> PartOutcome:
    part = Part(name, "tests.benchmarks.odd_part", 1)
    return run_part(part, spec_for(folder, name, seconds=LIMIT), shown.append)


@pytest.mark.parametrize("name", ["skipped", "failed"])
def test_a_part_that_ends_says_how_and_leaves_no_process(tmp_path: Path, name: str):
    shown: list[str] = []
    found = run(tmp_path, name, shown)
    assert (found.state, found.is_sound) == (name, name != "failed")
    assert shown == [f"{name} began"]
    if name == "skipped":
        assert found.reason == "there is nothing to measure"
        return
    assert found.figures["gpus"] == ""
    assert has_ended(found.figures["child"])
    assert found.reason == "ended with exit code 1"
    assert found.last_lines[-1] == "RuntimeError: the engine is not there"


def test_a_part_that_runs_over_is_ended_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its time is over when it has shown that it began."""
    shown: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + (LIMIT if shown else 0.0))
    monkeypatch.setattr(process, "time", clock)
    found = run(tmp_path, "late", shown)
    assert (found.state, found.is_sound) == ("late", False)
    assert has_ended(found.figures["child"])
    assert found.last_lines == ("late began",)


def test_parts_see_their_gpus_and_no_multicast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    spec = spec_for(tmp_path, "capture", device="cuda", devices=("2", "3"))
    variables = part_environment(spec)
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert variables["NCCL_NVLS_ENABLE"] == "0"
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert part_environment(spec)["NCCL_NVLS_ENABLE"] == "1"


def test_the_first_visible_gpus_are_taken_and_missing_ones_refused():
    assert host.chosen_devices("cuda", 2, ["4", "5", "6"]) == ("4", "5")
    assert host.chosen_devices("cpu", 2, []) == ()
    with pytest.raises(ValueError, match="--gpus 4, but 3 are visible"):
        host.chosen_devices("cuda", 4, ["4", "5", "6"])


def host_run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, parts: tuple[Part, ...]
) -> tuple[int, dict[str, Any]]:
    """Exit status and document of a benchmark of these parts."""
    monkeypatch.setattr(host, "PARTS", parts)
    monkeypatch.setattr(host, "rows_of", lambda outcome, on_gpus: [])
    arguments = ["--gpus", "2", "--device", "cpu", "--shape", "tiny", "--folder", str(folder / "parts")]
    monkeypatch.setattr(sys, "argv", ["host", *arguments, "--json", str(folder / "host.json")])
    return host.main(), json.loads((folder / "host.json").read_text())


def odd(name: str, **facts: bool) -> Part:
    return Part(name, "tests.benchmarks.odd_part", 1, **facts)


def test_a_failed_part_does_not_end_the_others_and_is_told_by_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    status, document = host_run(monkeypatch, tmp_path, (odd("failed"), odd("done")))
    assert status == 1
    assert [part["state"] for part in document["parts"]] == ["failed", "done"]
    assert "the engine is not there" in capsys.readouterr().out


def test_early_stages_run_beside_other_parts_and_never_beside_one_that_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parts = (odd("beside"), odd("alone", is_alone=True), odd("early", begins_early=True))
    status, document = host_run(monkeypatch, tmp_path, parts)
    assert status == 0
    beside, alone, early = (part["figures"] for part in document["parts"])
    assert beside["ended"] < early["early_stages_ended"] <= alone["began"]
    assert alone["ended"] <= early["went_on"]


def test_a_part_that_fails_in_its_early_stages_does_not_hold_others_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host, "QUIET_SECONDS", 2 * LIMIT)
    parts = (odd("alone", is_alone=True), odd("failed", begins_early=True))
    _, document = host_run(monkeypatch, tmp_path, parts)
    assert [part["state"] for part in document["parts"]] == ["done", "failed"]
    assert document["seconds"] < LIMIT


def test_early_stages_that_do_not_end_give_way_to_a_part_that_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def impatiently(signal: Any, folder: Path, seconds: float) -> bool:
        deadline = time.monotonic() + LIMIT
        while not (folder / "late" / "figures.json").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return wait_for(signal, folder, 1.0 if seconds == host.QUIET_SECONDS else seconds)

    monkeypatch.setattr(host, "wait_for", impatiently)
    parts = (odd("alone", is_alone=True), odd("late", begins_early=True))
    status, document = host_run(monkeypatch, tmp_path, parts)
    assert status == 1
    alone, late = document["parts"]
    assert (alone["state"], late["state"]) == ("done", "late")
    assert has_ended(late["figures"]["child"])


def test_large_files_of_a_part_go_and_its_logs_stay(tmp_path: Path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "plain.log").write_text("loaded")
    with (tmp_path / "engine" / "model.safetensors").open("wb") as file:
        file.truncate(1 << 23)
    host.remove_large(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["engine", "plain.log"]


def test_every_part_has_rows_and_fits_into_eight_minutes():
    assert sum(part.share for part in PARTS) + host.END_SECONDS <= 480
    for part in PARTS:
        assert rows_of(outcome(part.name, {})) == []


OF_A_TARGET = {
    "replicas": {
        "engines": 8,
        "tokens_per_second": {"plain": {"1": 100.0}, "capture": {"1": 98.0, "8": 745.0}},
    },
    "tensor_parallel": {
        "gpus_of_an_engine": 8,
        "tokens_per_second": {"plain": {"1": 400.0}, "capture": {"1": 380.0}},
    },
}
CAPTURE = {"capture": OF_A_TARGET, "mla": OF_A_TARGET, "is_quiet": True}


def test_ratios_of_capture_are_to_plain_prefill_and_to_as_many_times_one():
    rows = [row for row in rows_of(outcome("capture", CAPTURE)) if row.part == "capture"]
    found = [(row.what, row.beside, row.verdict) for row in rows]
    assert found == [
        ("plain prefill, 1 engine", "", ""),
        ("capture, 1 engine", "plain prefill, 1 engine", ""),
        ("capture, 8 replicas", "8 x plain prefill, 1 engine", ""),
        ("capture, 8 replicas", "8 x 1 engine", "reached (>= 0.9)"),
        ("plain prefill, tensor parallel 8", "plain prefill, 1 engine", ""),
        ("capture, tensor parallel 8", "plain prefill, tensor parallel 8", ""),
    ]
    ratios = [row.ratio for row in rows[1:]]
    assert ratios == pytest.approx([0.98, 745 / 800, 745 / 784, 4.0, 0.95])


def test_nothing_is_asked_of_a_cpu_of_a_miniature_and_of_what_ran_beside_other_work():
    assert {row.verdict for row in rows_of(outcome("capture", CAPTURE), on_gpus=False)} == {""}
    assert {
        row.verdict for row in rows_of(outcome("capture", {"mla": OF_A_TARGET})) if row.part == "mla"
    } == {""}
    beside = rows_of(outcome("capture", CAPTURE | {"is_quiet": False}))
    assert {row.verdict for row in beside} == {""}
    assert "capture, 8 replicas, beside other work" in {row.what for row in beside}


def test_one_gpu_has_no_rows_of_several():
    one = {
        "replicas": {"engines": 1, "tokens_per_second": {"plain": {"1": 100.0}, "capture": {"1": 98.0}}},
        "tensor_parallel": {"skipped": "one GPU: the same as one replica"},
    }
    assert [row.what for row in rows_of(outcome("capture", {"capture": one}))] == [
        "plain prefill, 1 engine",
        "capture, 1 engine",
        "tensor parallel",
    ]
    sums = rows_of(outcome("topology", {"all_reduce": {"skipped": "one GPU has no other to send to"}}))
    assert [row.value for row in sums] == ["one GPU has no other to send to"]


def test_a_part_that_was_ended_shows_what_it_had():
    engines = OF_A_TARGET["replicas"]
    figures = {"capture": {"replicas": engines, "tensor_parallel": {"failed": "not loaded after 90 s"}}}
    assert len(rows_of(outcome("capture", figures, state="late"))) == 4
    begun = engines | {"tokens_per_second": {"plain": {"1": 100.0}}}
    assert len(rows_of(outcome("capture", {"capture": {"replicas": begun}}, state="late"))) == 1
    assert rows_of(outcome("capture", {"capture": {"replicas": {"engines": 8}}}, state="late")) == []


def test_training_is_held_against_as_many_times_one_rank():
    figures = {
        "runs": [
            {"ranks": 1, "tokens_per_second": 50.0, "data_wait_share": 0.01},
            {"ranks": 4, "tokens_per_second": 170.0, "data_wait_share": 0.05},
        ],
        "steps": [
            {"ranks": 1, "tokens_per_second": 52.0, "ms": 100.0},
            {"ranks": 4, "tokens_per_second": 200.0, "ms": 26.0, "communication_ms": 2.6, "exposed_ms": 1.3,
             "own_ms": [24.0, 23.1, 24.6, 23.9]},
        ],
        "curves": {
            "steps": 10, "fall": 2.0, "largest_difference": 0.002, "largest_relative_difference": 0.0005
        },
    }  # fmt: skip
    text = format_rows(rows_of(outcome("training", figures)))
    assert "170 tokens/s" in text
    assert "0.850 of 4 x 1 rank" in text
    assert "MISSED (>= 0.9)" in text
    assert "5.0% of the time" in text
    assert "2.6 ms" in text
    assert "1.3 ms, 5.0% of the time" in text
    assert "23.1 to 24.6 ms" in text
    assert "at most 2.00e-03 (5.0e-04 of the loss) in 10 steps" in text


def test_the_environment_of_a_part_finds_the_project(tmp_path: Path):
    path = part_environment(spec_for(tmp_path, "capture"))["PYTHONPATH"]
    assert path.split(":")[0] == str(host_parts.PROJECT_ROOT)


def test_compiled_modules_are_kept_where_they_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in part_environment(spec_for(tmp_path, "capture"))
    assert host_parts.bytecode_variables(tmp_path) == {}
    monkeypatch.setattr(host_parts.os, "access", lambda path, mode: False)
    assert host_parts.bytecode_variables(tmp_path) == {"PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
