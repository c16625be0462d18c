"""Capture with the real vLLM: killed, resumed, compared layer by layer, and with requests that go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from eagle3_core.artifacts import Manifest
from eagle3_core.capture.compare import layer_distances
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.capture.vllm_engine import check_settings
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.contracts import StepSpec
from eagle3_core.errors import CaptureError
from eagle3_core.host.engine_environment import engine_environment
from eagle3_core.sections import CAPTURE_MARGIN_TOKENS
from eagle3_core.store.files import file_problem
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import CapturedSample, ShardReader
from eagle3_core.target.info import inspect_target
from tests.capture.runs import capture_folder, capture_spec, make_samples
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

LENGTHS = [17 + (index * 13) % 90 for index in range(80)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


def vllm_spec(root: Path, target: Path, lengths: list[int]) -> StepSpec:
    engine = {
        "max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 1, "python": sys.executable
    }  # fmt: skip
    return capture_spec(
        root, target, make_samples(lengths), engine=engine,
        capture={"engine": "vllm", "shard_bytes": 256 << 10, "max_batched_tokens": 128},
    )  # fmt: skip


def start(spec: StepSpec, root: Path, *module: str, **environment: str) -> subprocess.Popen[str]:
    (root / "spec.json").write_text(spec.model_dump_json())
    arguments = [str(root / "spec.json")]
    if not module:
        module, arguments = ("eagle3_core.step", "extract"), [*arguments, str(root / "result.json")]
    return subprocess.Popen(
        [sys.executable, "-m", *module, *arguments],
        cwd=PROJECT_ROOT,
        env=engine_environment(spec.config.engine) | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Read to the end; standard input stays open, since a step ends itself when it closes."""
    assert process.stdout is not None
    with process:
        return process.stdout.read()


class Killed:
    """A capture whose step was killed in the middle and then run again."""

    def __init__(self, root: Path, target: Path) -> None:
        self.spec = vllm_spec(root, target, LENGTHS)
        self.folder = capture_folder(self.spec)
        step = start(self.spec, root)
        assert step.stdout is not None
        num_done = 0
        for line in step.stdout:
            num_done += ".safetensors done" in line
            if num_done == 2:
                break
        step.kill()
        step.wait()
        manifest = LocalStore(self.spec.config.store_path).find(self.spec.outputs["capture"].ref)
        assert manifest is not None
        self.after_kill: Manifest = manifest
        self.problems = [file_problem(self.folder, entry) for entry in manifest.files]
        self.stamps = self.read_stamps()
        log = finish(start(self.spec, root))
        self.outcome: dict[str, Any] = json.loads((root / "result.json").read_text())
        assert self.outcome["status"] == "ok", log

    def read_stamps(self) -> dict[str, int]:
        return {p.path: (self.folder / p.path).stat().st_mtime_ns for p in self.after_kill.files}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Killed:
    return Killed(tmp_path_factory.mktemp("killed"), target)


def test_kill_9_of_the_step_keeps_finished_shards_and_the_next_run_makes_the_others(killed: Killed) -> None:
    assert killed.after_kill.state == "partial"
    assert len(killed.after_kill.files) >= 2
    assert killed.problems == [None] * len(killed.after_kill.files)
    manifest = LocalStore(killed.spec.config.store_path).read(killed.spec.outputs["capture"].ref)
    assert killed.read_stamps() == killed.stamps
    assert [manifest.file(entry.path) for entry in killed.after_kill.files] == list(killed.after_kill.files)
    result = killed.outcome["result"]
    assert result["num_shards"] == len(manifest.files) > len(killed.after_kill.files)
    assert 0 < result["num_new_shards"] <= result["num_shards"] - len(killed.after_kill.files)
    assert (result["num_samples"], result["num_tokens"]) == (80, sum(LENGTHS))


def test_kill_9_of_the_engine_in_the_third_of_five_shards_costs_that_shard_alone(
    tmp_path: Path, target: Path
) -> None:
    """The shards are so long that it is still in that one when it is killed."""
    samples = make_samples([100] * 360)
    capture = {"engine": "vllm", "max_batched_tokens": 64, "shard_bytes": 72 * 100 * 64 * 4 * 7}
    engine = {"max_model_len": 256, "max_num_seqs": 2, "kv_cache_gib": 1, "python": sys.executable}
    spec = capture_spec(tmp_path, target, samples, engine=engine, capture=capture)
    step = start(spec, tmp_path)
    staging = spec.config.store_path / "staging" / spec.outputs["capture"].ref.id
    third = {sample.key for sample in samples[144:216]}
    second_file, deadline = capture_folder(spec) / "shard-00001.safetensors", time.monotonic() + 500
    while not begun(staging):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (engine_process,) = [p for p in psutil.Process(step.pid).children() if "session" in " ".join(p.cmdline())]
    while not (second_file.exists() and begun(staging) & third):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine_process.kill()
    before = {path.name: path.stat().st_mtime_ns for path in capture_folder(spec).glob("*.safetensors")}
    finish(step)
    outcome = json.loads((tmp_path / "result.json").read_text())
    assert outcome["status"] == "ok", outcome
    assert (outcome["result"]["num_shards"], outcome["result"]["num_restarts"]) == (5, 1)
    assert outcome["result"]["quarantined"] == []
    manifest = LocalStore(spec.config.store_path).read(spec.outputs["capture"].ref)
    assert [entry.facts["attempts"] for entry in manifest.files] == [1, 1, 2, 1, 1]
    assert {"shard-00000.safetensors", "shard-00001.safetensors"} >= before.keys()
    after = {name: (capture_folder(spec) / name).stat().st_mtime_ns for name in before}
    assert after == before


def begun(staging: Path) -> set[str]:
    """Keys of samples that the session's engine has begun to compute."""
    lines = [line for path in staging.glob("sessions/*/*.log") for line in whole_lines(path)]
    return {json.loads(line[1:]) for line in lines if line.startswith("+")}


def whole_lines(path: Path) -> list[str]:
    return path.read_text().rpartition("\n")[0].splitlines()


def stored_samples(folder: Path) -> list[CapturedSample]:
    return [sample for path in sorted(folder.glob("*.safetensors")) for sample in ShardReader(path)]


def test_states_from_vllm_are_those_of_transformers_and_not_of_a_neighbouring_layer(
    killed: Killed, target: Path
) -> None:
    stored = stored_samples(killed.folder)
    assert [sample.key for sample in stored] == [sample.key for sample in make_samples(LENGTHS)]
    assert_right_layers(stored[::6], target)


@pytest.mark.slow
def test_two_ranks_that_hold_a_target_together_write_its_states_once(tmp_path: Path, target: Path) -> None:
    spec = vllm_spec(tmp_path, target, LENGTHS[:20])
    engine = spec.config.engine.model_copy(update={"tensor_parallel_size": 2})
    spec = spec.model_copy(update={"config": spec.config.model_copy(update={"engine": engine})})
    log = finish(start(spec, tmp_path))
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "ok", log
    stored = stored_samples(capture_folder(spec))
    assert [sample.key for sample in stored] == [sample.key for sample in make_samples(LENGTHS[:20])]
    assert_right_layers(stored[::4], target)


def assert_right_layers(chosen: list[CapturedSample], target: Path) -> None:
    """Every stored state equals its own layer of a transformers forward, and no other."""
    model = ReferenceModel(inspect_target(target), "float32")
    references = [model.all_states(sample.input_ids) for sample in chosen]
    every_row = [torch.arange(len(sample.input_ids)) for sample in chosen]
    layers = {k: [s.aux_states[:, place] for s in chosen] for place, k in enumerate((2, 4, 5))}
    for capture_id, states in layers.items():
        found = layer_distances(capture_id, states, every_row, references)
        assert found.errors[:, capture_id].max() < 1e-5
        assert found.nearest_wrong_median > 0.05
    final = [sample.final_states for sample in chosen]
    found = layer_distances(8, final, [sample.final_rows for sample in chosen], references)
    assert found.errors[:, 8].max() < 1e-5
    assert found.nearest_wrong_median > 0.05


def test_aborted_and_foreign_requests_do_no_harm_and_changed_ids_are_refused(
    tmp_path: Path, target: Path
) -> None:
    spec = vllm_spec(tmp_path, target, LENGTHS[:12])
    with start(spec, tmp_path, "tests.capture.vllm_faults", VLLM_ENABLE_V1_MULTIPROCESSING="1") as process:
        output, _ = process.communicate(timeout=500)
    answer = json.loads(output.splitlines()[-1])
    assert answer["came"]
    assert answer["last"] not in answer["came"]
    assert "sample sample-011: vllm-under-test ran token" in answer["message"]
    assert "at position 3" in answer["message"]


def settings(prefix_caching: bool, max_model_len: int, chunked: bool = True, step: int | None = None) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=chunked, max_num_scheduled_tokens=step, max_num_batched_tokens=64
        ),
    )


def test_an_engine_with_prefix_caching_or_too_little_room_is_refused_before_any_request() -> None:
    check_settings(settings(False, 100 + CAPTURE_MARGIN_TOKENS), 100)
    with pytest.raises(CaptureError, match="prefix caching is on"):
        check_settings(settings(True, 200), 100)
    with pytest.raises(CaptureError, match="takes 101 tokens"):
        check_settings(settings(False, 101), 100)


def test_an_engine_that_would_wait_for_ever_with_a_prompt_longer_than_a_step_is_refused() -> None:
    check_settings(settings(False, 200, chunked=False, step=100), 100)
    with pytest.raises(CaptureError, match="64 tokens in a step at most, and the longest sample has 100"):
        check_settings(settings(False, 200, chunked=False), 100)
