"""Miniatures: names of the real checkpoint, layers far apart, experts that rounding cannot change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.capture.compare import layer_distances
from eagle3_core.capture.miniature import NUM_CLASSES, chosen_experts, make_miniature
from eagle3_core.capture.miniature_config import miniature_config
from eagle3_core.capture.probe_plan import known_architecture, known_architectures
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.target.info import inspect_target

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", sorted(known_architectures()))
def test_rounding_to_bf16_leaves_each_layer_far_nearer_to_itself_than_to_any_other(
    name: str, tmp_path: Path
) -> None:
    miniature = make_miniature(miniature_config(known_architecture(name)), tmp_path)
    info = inspect_target(miniature.text_folder)
    exact, rounded = (ReferenceModel(info, dtype) for dtype in ("float32", "bfloat16"))
    ids = torch.arange(3, 123)
    reference, states = exact.all_states(ids), rounded.all_states(ids)
    rows = [torch.arange(len(ids))]
    for k in range(1, info.num_layers + 1):
        found = layer_distances(k, [states[:, k]], rows, [reference])
        assert found.nearest_id == k
        assert found.nearest_wrong_median > 10 * found.median_error
        assert found.nearest_wrong_median > 5 * found.p99_error, "not even rows whose experts are near"


def test_the_wrapper_has_the_names_of_the_published_checkpoint(tmp_path: Path) -> None:
    miniature = make_miniature(miniature_config(known_architecture("kimi-k2.5")), tmp_path)
    wrapped = load_file(miniature.folder / "model.safetensors")
    inside = load_file(miniature.text_folder / "model.safetensors")
    assert {name for name in wrapped if name.startswith("language_model.")} == {
        f"language_model.{name}" for name in inside
    }
    assert torch.equal(wrapped["language_model.model.norm.weight"], inside["model.norm.weight"])
    assert "language_model.model.layers.7.mlp.experts.15.down_proj.weight" in wrapped
    assert "language_model.model.layers.0.mlp.down_proj.weight" in wrapped, "the first layer is dense"
    assert "vision_tower.encoder.blocks.1.wqkv.weight" in wrapped
    assert inspect_target(miniature.folder).architecture == "KimiK25ForConditionalGeneration"


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    config = miniature_config(known_architecture("llama"))
    first, again, other = (
        load_file(make_miniature(config, tmp_path / str(seed), seed % 10).folder / "model.safetensors")
        for seed in (1, 11, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_experts_of_a_class_are_consecutive_and_from_as_many_groups_as_are_selected() -> None:
    ungrouped = {"num_experts_per_tok": 2}
    assert [chosen_experts(c, 8, ungrouped) for c in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    grouped = {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    assert chosen_experts(0, 8, grouped) == [0, 1, 2, 3]
    assert chosen_experts(1, 8, grouped) == [2, 3, 4, 5]
    assert chosen_experts(3, 16, grouped) == [12, 13, 0, 1]
    for number in range(NUM_CLASSES):
        experts = chosen_experts(number, 16, grouped)
        assert len(set(experts)) == 4
        assert len({expert // 4 for expert in experts}) == 2
