"""vLLM on GPUs against transformers, layer by layer, through the whole step with its engine sessions.

`EAGLE3_TEST_DEVICE=cuda python -m pytest -m gpu tests/gpu/test_capture_vllm.py` in an environment with vLLM's
CUDA build; `EAGLE3_TEST_TARGET` names the folder of a real target, by default a tiny one with random weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from eagle3_core.capture import extract
from eagle3_core.capture.compare import layer_distances
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.step import Progress
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import ShardReader
from eagle3_core.target.info import inspect_target
from tests.capture.runs import capture_folder, capture_spec, make_samples
from tests.tiny import make_tiny_target

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

TARGET = os.environ.get("EAGLE3_TEST_TARGET")
NUM_SAMPLES = 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if TARGET is not None:
        return Path(TARGET)
    return make_tiny_target(tmp_path_factory.mktemp("target"), max_position_embeddings=4096)


@pytest.mark.parametrize(("replicas", "tensor_parallel"), [(1, 1), (2, 1), (1, 2)])
def test_every_layer_is_right_and_each_shard_is_made_once(
    tmp_path: Path, target: Path, replicas: int, tensor_parallel: int
) -> None:
    if torch.cuda.device_count() < replicas * tensor_parallel:
        pytest.skip(f"fewer than {replicas * tensor_parallel} GPUs")
    info = inspect_target(target)
    heads = info.text_config["num_attention_heads"]
    if heads % tensor_parallel:
        pytest.skip(f"{heads} attention heads on {tensor_parallel} GPUs")
    samples = make_samples([64 + 37 * (index % 20) for index in range(NUM_SAMPLES)])
    engine = {
        "device": "cuda", "max_model_len": 2048, "max_num_seqs": 32, "gpu_memory_utilization": 0.4,
        "tensor_parallel_size": tensor_parallel, "python": sys.executable, "enforce_eager": True,
    }  # fmt: skip
    spec = capture_spec(
        tmp_path, target, samples, engine=engine, target={"model": str(target), "dtype": "bfloat16"},
        capture={
            "engine": "vllm", "shard_bytes": 4 << 20, "max_batched_tokens": 2048, "replicas": replicas
        },
    )  # fmt: skip
    result = extract.run(spec, Progress("extract"))
    assert (result.num_samples, result.captured_tokens) == (NUM_SAMPLES, sum(map(len, samples)))
    manifest = LocalStore(spec.config.store_path).read(spec.outputs["capture"].ref)
    assert [entry.facts["attempts"] for entry in manifest.files] == [1] * result.num_shards
    stored = [s for path in sorted(capture_folder(spec).glob("*.safetensors")) for s in ShardReader(path)]
    assert [sample.key for sample in stored] == [sample.key for sample in samples]
    chosen = stored[::6]
    model = ReferenceModel(info, "bfloat16", "cuda")
    references = [model.all_states(sample.input_ids).cpu() for sample in chosen]
    every_row = [torch.arange(len(sample.input_ids)) for sample in chosen]
    ids = ShardReader(next(capture_folder(spec).glob("*.safetensors"))).aux_layer_ids
    layers = {k: ([s.aux_states[:, place] for s in chosen], every_row) for place, k in enumerate(ids)}
    layers[info.num_layers] = ([s.final_states for s in chosen], [s.final_rows for s in chosen])
    for capture_id, (states, rows) in layers.items():
        found = layer_distances(capture_id, states, rows, references)
        print(
            f"{target.name} replicas {replicas} tp {tensor_parallel} capture id {capture_id}: "
            f"median {found.median_error:.4f} p99 {found.p99_error:.4f} "
            f"nearest wrong {found.nearest_wrong_median:.4f}"
        )
        assert found.is_right
        assert found.median_error < 0.03
