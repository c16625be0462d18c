"""A language model inside a multimodal wrapper is captured, verified and trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from eagle3_core.capture import extract, verify
from eagle3_core.step import Progress
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.weights import read_embedding, read_lm_head
from eagle3_core.training import train
from tests.capture.damage import greedy_samples
from tests.capture.runs import capture_spec, verify_spec
from tests.tiny import make_tiny_target
from tests.training import examples

pytestmark = pytest.mark.engine

NUM_LAYERS = 4
AUX_IDS = [1, 2, 3]


@pytest.fixture(scope="module", params=["language_model.model.", "model.language_model."])
def nested(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    """Llava around a tiny Llama, with a vision tower of as many layers, under either naming."""
    root = tmp_path_factory.mktemp("nested")
    plain = make_tiny_target(
        root, num_layers=NUM_LAYERS, hidden_size=64, intermediate_size=96, vocab_size=300, tokenizer_size=290
    )
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=NUM_LAYERS, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlavaConfig(text_config=LlamaConfig.from_pretrained(plain), vision_config=vision)
    LlavaForConditionalGeneration(config).save_pretrained(plain)
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if request.param == "model.language_model.":
            name = name.replace("language_model.model.", request.param)
            name = name.replace("language_model.lm_head", "lm_head")
        tensors[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    info = inspect_target(plain)
    assert info.norm.name == f"{request.param}norm.weight"
    return info


def test_a_nested_target_is_captured_and_verified(nested: TargetInfo, tmp_path: Path) -> None:
    target = {"model": nested.path, "dtype": "float32", "aux_layer_ids": AUX_IDS}
    capture = {"engine": "reference", "reference_batching": "packed"}
    samples = greedy_samples(Path(nested.path), [12, 14, 16, 13, 15], vocab_size=290)
    spec = capture_spec(tmp_path, Path(nested.path), samples, target=target, capture=capture)
    extract.run(spec, Progress("extract"))
    result = verify.run(verify_spec(spec), Progress("verify"))
    assert result.agreement == 1.0
    assert [layer.nearest_id for layer in result.layers] == [*AUX_IDS, NUM_LAYERS]


def test_a_draft_is_trained_for_a_nested_target(nested: TargetInfo, tmp_path: Path) -> None:
    config = examples.make_config(nested.path, train={"num_epochs": 1})
    spec = examples.write_inputs(tmp_path, config, nested, examples.make_samples(nested))
    progress: Any = Progress("train")
    assert train.run(spec, progress).num_steps >= 2
    assert read_lm_head(nested).shape == read_embedding(nested).shape == (300, 64)
