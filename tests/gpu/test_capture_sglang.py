"""SGLang on a GPU against transformers, layer by layer: miniatures with random weights and a real target.

`EAGLE3_TEST_DEVICE=cuda python -m pytest -m gpu tests/gpu/test_capture_sglang.py` in an environment with
SGLang; `EAGLE3_TEST_TARGET` names the folder of a real target, `EAGLE3_TEST_ATTENTION` an attention backend.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from eagle3_core.capture.probe import run
from eagle3_core.capture.probe_plan import architecture_run, known_architecture
from eagle3_core.capture.sglang_engine import capture_with_sglang
from eagle3_core.config import RunConfig
from eagle3_core.contracts import ProbeSpec
from tests.capture.runs import make_samples
from tests.capture.sglang_capture import Session

pytestmark = [pytest.mark.sglang, pytest.mark.gpu]

ATTENTION = os.environ.get("EAGLE3_TEST_ATTENTION", "triton")
TARGET = os.environ.get("EAGLE3_TEST_TARGET")


def probe_run(hooks: str) -> RunConfig:
    config = architecture_run("sglang", "cuda", sys.executable)
    capture = {"sglang_attention_backend": ATTENTION, "sglang_hooks": hooks}
    return config.model_copy(update={"capture": config.capture.model_copy(update=capture)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(
    ("name", "hooks"),
    [("llama", "layers"), ("llama", "model"), ("qwen3-moe", "layers"), ("deepseek-v3", "layers")],
)
def test_every_layer_of_a_miniature_is_right_and_no_request_gets_anothers(
    tmp_path: Path, name: str, hooks: str
) -> None:
    spec = ProbeSpec(config=probe_run(hooks), target_config=known_architecture(name), folder=str(tmp_path))
    result = run(spec, lambda *_, **__: None)
    for layer in result.layers:
        print(name, hooks, layer.model_dump())
    assert result.outcome == "ok", result.reason


@pytest.mark.skipif(TARGET is None or not torch.cuda.is_available(), reason="no CUDA GPU or no target")
def test_every_layer_of_a_real_target_is_right(tmp_path: Path) -> None:
    assert TARGET is not None
    samples = make_samples([64 + 37 * (index % 20) for index in range(60)])
    session = Session.make(
        tmp_path, Path(TARGET), samples,
        target={"model": TARGET, "dtype": "bfloat16"},
        engine={"device": "cuda", "max_model_len": 2048, "max_num_seqs": 32, "gpu_memory_utilization": 0.5},
        capture={"shard_bytes": 16 << 20, "max_batched_tokens": 2048, "sglang_attention_backend": ATTENTION},
    )  # fmt: skip
    counted: list[int] = []
    list(capture_with_sglang(session.config, session.info, session.job, session.samples, counted.append))
    assert sum(counted) == sum(map(len, samples))
    for layer in session.distances(every=6, device="cuda"):
        print(layer.capture_id, layer.median_error, layer.p99_error, layer.nearest_wrong_median)
        assert layer.is_right
        assert layer.median_error < 0.03
