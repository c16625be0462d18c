"""Probes of many architectures: what is kept of each answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.capture import probe_all as module
from eagle3_core.capture.probe_all import probe_all
from eagle3_core.capture.probe_plan import architecture_run
from eagle3_core.capture.probe_record import read_records
from eagle3_core.contracts import ProbeOutcome, ProbeResult
from eagle3_core.host.engine_info import EngineVersions

GPU = "NVIDIA H200"


class Engines:
    """Answers in the place of engines; `gemma-3` ends without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, record: Path) -> None:
        self.asked: list[str] = []
        self.recorded: list[str] = []
        self._record = record
        versions = EngineVersions(python="3.11.7", packages={"vllm": "0.26.0"})
        monkeypatch.setattr(module, "capture_versions", lambda config: versions)
        monkeypatch.setattr(module, "known_architecture", lambda name: {"name": name})
        monkeypatch.setattr(module, "probe_one", self.answer)

    def answer(self, config: object, versions: object, target: dict[str, str], *_: object) -> ProbeResult:
        name = target["name"]
        has_failed = name == "gemma-3"
        self.asked.append(name)
        if self._record.exists():
            self.recorded = list(read_records(self._record.parent)[0].results)
        return answer("failed" if has_failed else "ok", "cuda" if has_failed else GPU)


def answer(outcome: ProbeOutcome, device: str) -> ProbeResult:
    return ProbeResult(
        outcome=outcome, reason="", engine="vllm", packages={}, device=device, dtype="bfloat16",
        tensor_parallel_size=1, architecture="SomeForCausalLM", layers=[], num_requests=0, seconds=1.0,
        made_at="2026-01-02T03:04:05+00:00",
    )  # fmt: skip


def test_every_answer_is_on_disk_before_the_next_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shown = tmp_path / "records" / "gpu.json", []
    engines = Engines(monkeypatch, path)
    config = architecture_run("vllm", "cuda")
    probe_all(config, ["qwen3"], tmp_path, record_path=path)
    found = probe_all(
        config,
        ["gemma-3", "llama", "gpt-oss"],
        tmp_path,
        on_result=lambda *told: shown.append(told),
        record_path=path,
    )
    assert engines.asked == ["qwen3", "gemma-3", "llama", "gpt-oss"]
    assert [(name, one.outcome) for name, one in shown[:2]] == [("gemma-3", "failed"), ("llama", "ok")]
    assert found.device == GPU
    assert engines.recorded == ["gemma-3", "llama", "qwen3"]  # when the last question was asked
    (recorded,) = read_records(path.parent)
    outcomes = {name: one.outcome for name, one in recorded.results.items()}
    assert outcomes == {"gemma-3": "failed", "llama": "ok", "gpt-oss": "ok", "qwen3": "ok"}


def test_a_failure_alone_names_no_gpu_and_is_written_when_all_have_been_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "records" / "gpu.json"
    engines = Engines(monkeypatch, path)
    probe_all(architecture_run("vllm", "cuda"), ["gemma-3", "llama"], tmp_path, record_path=path)
    assert engines.recorded == []
    assert list(read_records(path.parent)[0].results) == ["gemma-3", "llama"]
