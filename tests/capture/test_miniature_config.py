"""What a miniature keeps of its target, and what it makes small."""

from __future__ import annotations

import pytest

from eagle3_core.capture.miniature_config import NUM_LAYERS, miniature_config, probe_layer_ids
from eagle3_core.capture.probe_plan import known_architecture, known_architectures
from eagle3_core.errors import TargetError
from eagle3_core.target.layers import default_aux_layer_ids


def test_all_architectures_that_the_probe_is_tried_on_are_known():
    assert set(known_architectures()) == {
        "llama", "qwen3", "qwen3-moe", "gemma-3", "gpt-oss", "deepseek-v3", "kimi-k2.5"
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(known_architectures()))
def test_a_miniature_is_small_and_of_the_same_architecture(name):
    config = known_architecture(name)
    small = miniature_config(config)
    assert (small["architectures"], small["model_type"]) == (config["architectures"], config["model_type"])
    text = small.get("text_config", small)
    assert text["num_hidden_layers"] == NUM_LAYERS
    assert text["hidden_size"] <= 512
    assert text["vocab_size"] == 512
    assert "quantization_config" not in text
    assert small["dtype"] == "bfloat16"


def test_the_default_ids_differ_in_a_miniature():
    assert default_aux_layer_ids(NUM_LAYERS) == (2, 4, 5)
    assert probe_layer_ids(8, None) == ((1, 2, 3, 4, 5, 6, 7), (2, 4, 7))
    assert probe_layer_ids(8, (0, 4, 6)) == ((0, 1, 2, 3, 4, 5, 6, 7), (0, 4, 7))
    assert probe_layer_ids(4, None) == ((1, 2, 3), (1, 2, 3))


def test_heads_keep_their_size_and_their_groups():
    llama = miniature_config(known_architecture("llama"))
    assert (llama["num_attention_heads"], llama["num_key_value_heads"], llama["head_dim"]) == (8, 2, 128)
    three = known_architecture("llama") | {
        "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576
    }  # fmt: skip
    small = miniature_config(three)
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["head_dim"]) == (6, 2, 64)
    assert small["hidden_size"] == 384, "a multiple of six heads"


def test_heads_can_be_divided_among_gpus():
    three = known_architecture("llama") | {"num_attention_heads": 9, "num_key_value_heads": 3}
    assert miniature_config(three, tensor_parallel_size=4)["num_attention_heads"] % 4 == 0
    latent = miniature_config(known_architecture("deepseek-v3"), tensor_parallel_size=8)
    assert latent["num_attention_heads"] == 16


def test_latent_attention_keeps_the_ranks_that_its_kernels_know():
    config = known_architecture("deepseek-v3")
    small = miniature_config(config)
    kept = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_scaling")
    assert {key: small[key] for key in kept} == {key: config[key] for key in kept}
    assert small["max_position_embeddings"] == 163840, "the positions are a part of yarn's scale"
    assert (small["first_k_dense_replace"], small["num_nextn_predict_layers"]) == (3, 0)
    assert (small["n_routed_experts"], small["n_group"], small["topk_group"]) == (16, 4, 2)


def test_every_kind_of_layer_is_in_a_miniature():
    alternating = miniature_config(known_architecture("gpt-oss"))["layer_types"]
    assert alternating == ["sliding_attention", "full_attention"] * 4
    rare = known_architecture("gpt-oss") | {"layer_types": ["sliding_attention"] * 23 + ["full_attention"]}
    assert miniature_config(rare)["layer_types"] == ["sliding_attention"] * 7 + ["full_attention"]
    gemma = miniature_config(known_architecture("gemma-3"))
    assert (gemma["sliding_window_pattern"], gemma["sliding_window"]) == (6, 64)


def test_a_wrapper_stays_a_wrapper():
    small = miniature_config(known_architecture("kimi-k2.5"))
    assert small["text_config"]["model_type"] == "kimi_k2"
    assert small["vision_config"]["vt_hidden_size"] == small["vision_config"]["hidden_size"] == 64
    assert small["vision_config"]["text_hidden_size"] == small["text_config"]["hidden_size"]
    assert small["media_placeholder_token_id"] < small["text_config"]["vocab_size"]


def test_an_unknown_wrapper_is_named():
    config = {"model_type": "llava", "text_config": known_architecture("llama")}
    with pytest.raises(TargetError, match="no miniature can be made of the wrapper llava"):
        miniature_config(config)


def test_a_configuration_in_other_words_is_named():
    with pytest.raises(TargetError, match="a gpt2: its configuration has no num_hidden_layers, hidden_size"):
        miniature_config({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "vocab_size": 50257})


def test_positions_may_be_left_open():
    small = miniature_config(
        known_architecture("llama") | {"max_position_embeddings": None, "rope_scaling": None}
    )
    assert (
        small["max_position_embeddings"]
        == miniature_config(known_architecture("qwen3"))["max_position_embeddings"]
    )
