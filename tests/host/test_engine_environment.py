"""Variables of a step's process, and which environment captures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eagle3_core.config import PROJECT_ROOT, RunConfig
from eagle3_core.errors import HostError
from eagle3_core.host.engine_environment import (
    SGLANG_CPU_PACKAGES,
    capture_engine_config,
    engine_environment,
)
from eagle3_core.host.engine_info import capture_versions, engine_versions
from eagle3_core.sections import EngineConfig


def environment_with(folder: Path, package: str) -> str:
    """The interpreter of an environment that has a package; it answers the question for versions."""
    packages = folder / "lib" / "python3.11" / "site-packages" / package
    packages.mkdir(parents=True)
    (packages / "__init__.py").write_text("")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    versions = {"torch": "2.13.0", "transformers": "5.12.1", "safetensors": "0.8.0", package: "0.5.16"}
    answer = json.dumps({"python": "3.11.7", "packages": versions})
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    return str(python)


def test_placeholders_are_on_the_path_of_sglang_on_the_cpu_and_of_nothing_else(tmp_path: Path) -> None:
    sglang, vllm = environment_with(tmp_path / "a", "sglang"), environment_with(tmp_path / "b", "vllm")
    on_cpu = engine_environment(EngineConfig(python=sglang), inherited={"PYTHONPATH": "/mine"})
    assert on_cpu["PYTHONPATH"].split(os.pathsep) == [str(PROJECT_ROOT), "/mine", str(SGLANG_CPU_PACKAGES)]
    assert on_cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    for engine in (EngineConfig(python=vllm), EngineConfig(python=sglang, device="cuda")):
        elsewhere = engine_environment(engine, inherited={})
        assert elsewhere["PYTHONPATH"] == str(PROJECT_ROOT)
        assert "SGLANG_USE_CPU_ENGINE" not in elsewhere


def run_config(engine: str, python: str | None, capture: str) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "a", "target": {"model": "m"}, "engine": {"python": engine},
         "capture": {"python": python, "engine": capture}}
    )  # fmt: skip


def test_the_engine_that_captures_is_asked_in_its_own_environment(tmp_path: Path) -> None:
    sglang = environment_with(tmp_path / "a", "sglang")
    config = run_config("/nowhere/python", sglang, "sglang")
    assert capture_engine_config(config).python == sglang
    assert capture_engine_config(run_config("/here/python", None, "vllm")).python == "/here/python"
    versions = capture_versions(config)
    assert versions.capture_engine(config) == "sglang 0.5.16"
    assert engine_versions(EngineConfig(python=sglang)).sglang == "sglang 0.5.16"
    with pytest.raises(HostError, match="lacks vllm"):
        _ = versions.vllm


def test_a_missing_environment_for_sglang_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"no interpreter .*`make setup-sglang`"):
        capture_versions(run_config("/nowhere/python", str(tmp_path / "python"), "sglang"))
    vllm = environment_with(tmp_path / "b", "vllm")
    config = run_config(vllm, vllm, "sglang")
    with pytest.raises(HostError, match=r"lacks sglang.*`make setup-sglang`"):
        capture_versions(config).capture_engine(config)


def test_a_wrong_interpreter_for_capture_names_the_field_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"no interpreter /nowhere/python; correct capture\.python"):
        capture_versions(run_config(str(tmp_path / "python"), "/nowhere/python", "vllm"))
