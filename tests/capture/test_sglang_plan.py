"""What SGLang is started with and refused for; no engine is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.sglang_plan import JOB_NAME, REQUIRED_SETTINGS, check_settings, hook_specs
from eagle3_core.capture.sglang_transport import command_line
from eagle3_core.errors import CaptureError
from eagle3_core.sections import SGLANG_MARGIN_TOKENS
from eagle3_core.store.shards import PlannedShard, ShardLayout


def make_job(folder: Path, aux: tuple[int, ...] = (0, 2, 4)) -> CaptureJob:
    return CaptureJob(
        engine="sglang 0.5.16",
        dataset_folder=str(folder),
        folder=str(folder),
        layout=ShardLayout(aux, 8, 16, "float32", "all"),
        shards=(PlannedShard(0, 0, 1, 64),),
    )


def test_layer_hooks_read_the_layer_before_the_capture_id_and_the_embedding_for_id_0(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    specs = {spec["name"]: spec for spec in hook_specs(job, "layers")}
    assert list(specs) == [f"eagle3 {name}" for name in ("state 0", "state 2", "state 4", "state 8", "batch")]
    assert "model.embed_tokens" in specs["eagle3 state 0"]["target_modules"]
    assert "language_model.model.layers.1" in specs["eagle3 state 2"]["target_modules"]
    assert "model.layers.7" in specs["eagle3 state 8"]["target_modules"]
    path = Path(specs["eagle3 batch"]["config"]["job"])
    assert path.name == JOB_NAME
    assert CaptureJob.model_validate_json(path.read_text()) == job


def test_the_models_own_capture_needs_the_model_and_its_last_norm(tmp_path: Path) -> None:
    specs = hook_specs(make_job(tmp_path, aux=(2, 4)), "model")
    assert [spec["hook_factory"].split(":")[1] for spec in specs] == [
        "make_final_hook", "make_model_hook", "make_batch_hook"
    ]  # fmt: skip
    assert "model.norm" in specs[0]["target_modules"]


def settings(**changes: Any) -> dict[str, Any]:
    return REQUIRED_SETTINGS | {"context_length": 100 + SGLANG_MARGIN_TOKENS} | changes


def test_an_engine_that_would_return_other_rows_is_refused_by_the_setting() -> None:
    check_settings(settings(cuda_graph_config={"prefill": {"backend": "disabled"}}), 100)
    for change, message in {
        ("disable_radix_cache", False): "disable_radix_cache=False: shared prefixes would have no states",
        ("disable_prefill_cuda_graph", False): "hooks do not run in a graph",
        ("enforce_disable_flashinfer_allreduce_fusion", False): "partial sums",
        ("enable_dp_attention", True): "enable_dp_attention=True",
        ("context_length", 101): "takes 101 tokens",
    }.items():
        with pytest.raises(CaptureError, match=message):
            check_settings(settings(**dict([change])), 100)
    with pytest.raises(CaptureError, match="CUDA graphs"):
        check_settings(settings(cuda_graph_config={"prefill": {"backend": "full"}}), 100)
    lacking = settings()
    del lacking["disable_radix_cache"]
    with pytest.raises(CaptureError, match="not a setting of this release"):
        check_settings(lacking, 100)


def test_server_arguments_become_options() -> None:
    hooks = [{"name": "a", "config": {"capture_id": 2}}]
    options = command_line({"tp_size": 2, "disable_radix_cache": True, "trust_remote_code": False,
                            "attention_backend": None, "forward_hooks": hooks})  # fmt: skip
    assert options[:4] == ["--tp-size", "2", "--disable-radix-cache", "--forward-hooks"]
    assert json.loads(options[4]) == hooks
