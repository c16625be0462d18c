"""The random target of the benchmarks is one that engines and the pipeline can read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.random_target import (
    SHAPES,
    TargetShape,
    group_files,
    weight_shapes,
    write_hollow_target,
    write_random_target,
)
from eagle3_core.target.info import inspect_target

pytestmark = pytest.mark.engine

SMALL = TargetShape(hidden=64, intermediate=96, layers=3, heads=4, kv_heads=2, vocab=128)


def test_the_named_shapes_have_the_parameters_of_their_models():
    counts = {
        name: sum(math.prod(sizes) for sizes in weight_shapes(shape).values())
        for name, shape in SHAPES.items()
    }
    assert {name: counts[name] for name in ("smollm2", "llama-8b")} == {
        "smollm2": 134_515_008,
        "llama-8b": 8_030_261_248,
    }


def test_files_hold_at_most_the_bytes_they_may():
    shapes = {"a": (2, 5), "b": (10,), "c": (100,), "d": (3,)}
    assert list(group_files(shapes, file_bytes=40)) == [["a", "b"], ["c"], ["d"]]


def test_transformers_loads_every_weight(tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    write_random_target(SMALL, tmp_path, "cpu", file_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    info = inspect_target(tmp_path)
    assert (info.num_layers, info.hidden_size, info.vocab_size) == (3, 64, 128)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    states = model(torch.arange(20).unsqueeze(0)).logits
    assert torch.isfinite(states).all()


def test_a_hollow_target_has_every_weight_and_takes_no_space(tmp_path: Path):
    write_hollow_target(SHAPES["smollm2"], tmp_path)
    info = inspect_target(tmp_path)
    assert info.num_parameters == 134_515_008
    assert info.missing_files == ()
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert used < 1 << 20
