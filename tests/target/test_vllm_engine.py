"""What vLLM is told of a GPU's memory, and what its kernels need on the CPU."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from eagle3_core.config import RunConfig
from eagle3_core.target import vllm_engine
from eagle3_core.target.vllm_engine import load_vllm
from tests.doubles.profile import stand_in_config


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the last engine."""
    arguments: dict[str, Any] = {}
    vllm = ModuleType("vllm")
    vllm.LLM = arguments.update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return arguments


def config_of(tmp_path: Any, **engine: Any) -> RunConfig:
    config = stand_in_config(tmp_path)
    return config.model_copy(update={"engine": config.engine.model_copy(update=engine)})


def test_a_cache_of_given_size_spares_vllm_measuring_memory(tmp_path: Any, told: dict[str, Any]):
    load_vllm(config_of(tmp_path, device="cuda", gpu_kv_cache_gib=1.5), "target")
    assert told["kv_cache_memory_bytes"] == 3 << 29
    assert told["gpu_memory_utilization"] == 0.9


@pytest.mark.parametrize("engine", [{"device": "cuda"}, {"device": "cpu", "gpu_kv_cache_gib": 1.5}])
def test_without_a_size_and_on_the_cpu_vllm_finds_it_for_itself(
    tmp_path: Any, told: dict[str, Any], engine: dict[str, Any]
):
    load_vllm(config_of(tmp_path, **engine), "target")
    assert "kv_cache_memory_bytes" not in told


@pytest.mark.parametrize(("device", "workers"), [("cpu", vllm_engine.AMX_WORKER), ("cuda", None)])
def test_on_the_cpu_each_worker_asks_for_amx(
    tmp_path: Any, told: dict[str, Any], device: str, workers: str | None
):
    load_vllm(config_of(tmp_path, device=device), "target")
    assert told.get("worker_extension_cls") == workers


@pytest.mark.parametrize(("chosen", "method"), [(None, "spawn"), ("fork", "fork")])
def test_engines_are_not_forked_from_a_process_that_has_computed(
    tmp_path: Any, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, chosen: str | None, method: str
):
    variable = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setenv(variable, chosen or "")
    if chosen is None:
        monkeypatch.delenv(variable)
    load_vllm(config_of(tmp_path, device="cuda"), "target")
    assert os.environ[variable] == method
