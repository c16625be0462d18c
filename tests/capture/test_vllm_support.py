"""Targets that vLLM cannot capture are refused from its model classes, without loading."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.capture.job import CaptureJob, capture_layout
from eagle3_core.capture.vllm_engine import capture_with_vllm
from eagle3_core.capture.vllm_support import check_embedding_state, check_vllm_support, unsupported_reason
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import CaptureError
from eagle3_core.store.shards import plan_shards
from eagle3_core.target.info import TargetInfo, inspect_target
from tests.capture.runs import make_samples, run_config
from tests.target.files import LLAMA, write_sharded

pytestmark = pytest.mark.engine

CONFIGS = Path(__file__).parents[2] / "eagle3_core" / "capture" / "architectures"
TENSORS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def target(folder: Path, config: dict[str, Any]) -> TargetInfo:
    prefix = "language_model." if "text_config" in config else ""
    shapes = {prefix + name: [16, 8] if name != TENSORS[1] else [8] for name in TENSORS}
    return inspect_target(write_sharded(folder, config, {"model.safetensors": shapes}))


def real(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_architectures_with_the_interface_pass(tmp_path: Path, name: str) -> None:
    check_vllm_support(target(tmp_path, real(name)), (1, 2, 3))


def test_a_wrapper_with_the_interface_passes(tmp_path: Path) -> None:
    """In another process: vLLM's class imports numba, beside which no engine can be loaded in this one."""
    info = target(tmp_path, real("kimi-k2.5"))
    code = (
        "import sys; from eagle3_core.capture.vllm_support import check_vllm_support; "
        "from eagle3_core.target.info import TargetInfo; "
        "check_vllm_support(TargetInfo.model_validate_json(sys.argv[1]), (1, 2, 3)); print('passed')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, info.model_dump_json()],
        cwd=PROJECT_ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["passed"], done.stderr


def test_gemma_3_is_refused_with_architecture_and_version(tmp_path: Path) -> None:
    import vllm

    info = target(tmp_path, real("gemma-3"))
    started = time.monotonic()
    with pytest.raises(CaptureError) as caught:
        check_vllm_support(info, (2, 13, 23))
    message = str(caught.value)
    assert f"vLLM {vllm.__version__} has no EAGLE-3 support" in message
    assert "Gemma3ForCausalLM" in message
    assert "set capture.engine to sglang or reference" in message
    assert "\n" not in message
    assert time.monotonic() - started < 300


def test_a_capture_of_gemma_3_ends_before_the_engine_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    info = target(folder, real("gemma-3"))
    settings, samples = run_config(tmp_path, folder), make_samples([8, 9])
    layout = capture_layout(settings, info)
    job = CaptureJob(
        engine="vllm-test",
        dataset_folder=str(tmp_path),
        folder=str(tmp_path / "session"),
        layout=layout,
        shards=tuple(plan_shards(samples, layout, 4096)),
    )
    with pytest.raises(CaptureError, match=r"has no EAGLE-3 support.*Gemma3ForCausalLM"):
        next(capture_with_vllm(settings, info, job, samples, lambda count: None))


def test_a_wrapper_whose_language_model_lacks_the_interface_is_refused(tmp_path: Path) -> None:
    wrapper = {"architectures": ["UnheardOf"], "text_config": real("gemma-3")}
    reason = unsupported_reason(target(tmp_path, wrapper))
    assert reason is not None
    assert "Gemma3ForCausalLM" in reason


def test_of_an_architecture_without_a_class_nothing_is_claimed(tmp_path: Path) -> None:
    assert unsupported_reason(target(tmp_path, LLAMA | {"architectures": ["UnheardOf"]})) is None


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2.5"])
def test_the_embedding_output_of_deepseek_types_is_refused(tmp_path: Path, name: str) -> None:
    info = target(tmp_path, real(name))
    with pytest.raises(CaptureError, match=r"vLLM cannot capture id 0 .*ids from 1 on.*aux_layer_ids"):
        check_embedding_state(info, (0, 30, 58, 61))
    check_embedding_state(info, (2, 30, 58, 61))


def test_the_embedding_output_of_other_models_is_fine(tmp_path: Path) -> None:
    check_embedding_state(target(tmp_path, LLAMA), (0, 3, 5))
