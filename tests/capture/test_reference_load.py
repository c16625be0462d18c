"""Which model transformers loads for a target, wrappers included, and where its decoder layers are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from eagle3_core.capture.miniature import make_miniature
from eagle3_core.capture.miniature_config import miniature_config
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.capture.reference_load import find_decoder_layers
from eagle3_core.errors import HostError, TargetError
from eagle3_core.target.info import inspect_target
from tests.capture.wrapped import wrap
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

IDS = torch.arange(3, 40)
NUM_LAYERS = 3
KIMI = Path(__file__).parents[2] / "eagle3_core" / "capture" / "architectures" / "kimi-k2.5.json"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "rename",
    [
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        {"model.": "model.language_model.", "lm_head.": "lm_head."},
        {"model.": "language_model.", "lm_head.": "language_model.lm_head."},
    ],
    ids=["language_model.model", "model.language_model", "language_model"],
)
def test_the_language_model_of_an_unknown_wrapper_is_built_alone(
    tmp_path: Path, tied: bool, rename: dict[str, str]
) -> None:
    plain = make_tiny_target(tmp_path / "plain", num_layers=NUM_LAYERS, tied=tied)
    towers = {"vision_tower.layers.0.weight": torch.ones(4, 4), "mm_projector.weight": torch.ones(4)}
    wrapped = wrap(plain, tmp_path / "wrapped", rename, towers)
    expected = ReferenceModel(inspect_target(plain), "float32").forward(IDS, range(NUM_LAYERS + 1))
    found = ReferenceModel(inspect_target(wrapped), "float32").forward(IDS, range(NUM_LAYERS + 1))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_kimi_k25_gives_the_states_of_the_language_model_inside(tmp_path: Path) -> None:
    made = make_miniature(miniature_config(json.loads(KIMI.read_text())), tmp_path)
    wrapped, alone = (inspect_target(path) for path in (made.folder, made.text_folder))
    assert wrapped.architecture == "KimiK25ForConditionalGeneration"
    expected = ReferenceModel(alone, "float32").forward(IDS, range(alone.num_layers + 1))
    found = ReferenceModel(wrapped, "float32").forward(IDS, range(alone.num_layers + 1))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def gemma_wrapper(vision_layers: int = NUM_LAYERS) -> Gemma3ForConditionalGeneration:
    text = {
        "num_hidden_layers": NUM_LAYERS, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128, "sliding_window": 16,
    }  # fmt: skip
    vision = {
        "num_hidden_layers": vision_layers, "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    return Gemma3ForConditionalGeneration(config).eval()


def test_a_wrapper_with_a_vision_tower_of_as_many_layers_is_captured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = gemma_wrapper()
    wrapper.save_pretrained(tmp_path)
    info = inspect_target(tmp_path)
    assert (info.nested_under, info.num_layers, info.tied_embeddings) == ("text_config", NUM_LAYERS, True)
    with caplog.at_level(logging.INFO):
        model = ReferenceModel(info, "float32")
    with torch.inference_mode():
        output = wrapper(input_ids=IDS[None], output_hidden_states=True)
    states, logits = model.forward(IDS, range(NUM_LAYERS + 1))
    for k in range(NUM_LAYERS):
        torch.testing.assert_close(states[:, k], output.hidden_states[k][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, output.logits[0], atol=1e-5, rtol=1e-5)
    assert "transformers loads" in caplog.text


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)


class Part(nn.Module):
    def __init__(self, width: int, count: int = NUM_LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))


def wrapper(**parts: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, part in parts.items():
        root.add_module(name, part)
    return root


@pytest.mark.parametrize(
    "parts",
    [
        {"vision_tower": Part(8), "audio_tower": Part(8)},
        {"encoder": Part(4)},
        {"resampler": Part(8), "other": Part(8, count=2)},
    ],
    ids=["towers", "another-width", "another-place"],
)
def test_the_decoder_is_told_from_other_lists_of_layers(parts: dict[str, Any]) -> None:
    text = Part(8)
    model = wrapper(**parts, language_model=text)
    assert find_decoder_layers(model, NUM_LAYERS, 8) is text.layers


def test_two_lists_of_which_none_is_preferred_are_named() -> None:
    model = wrapper(left=Part(8), right=Part(8))
    with pytest.raises(TargetError, match=r"2 lists of 3 layers \(left.layers, right.layers\)"):
        find_decoder_layers(model, NUM_LAYERS, 8)
    with pytest.raises(TargetError, match="0 lists of 7 layers"):
        find_decoder_layers(model, 7, 8)


def test_a_weight_that_no_file_has_is_refused_and_not_made_up(tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path, num_layers=NUM_LAYERS)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        TargetError, match=r"no weights for 1 parameters, e.g. model\.layers\.1\.mlp\.up_proj"
    ):
        ReferenceModel(inspect_target(folder), "float32")


def test_a_target_without_room_for_its_weights_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = inspect_target(make_tiny_target(tmp_path, num_layers=1))
    huge = info.model_copy(update={"num_parameters": 10**15})

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    with pytest.raises(HostError, match=r"the host has .*expected at least 1862645\.1 GiB for the weights"):
        ReferenceModel(huge, "bfloat16")
