"""RoPE, attention and experts in the spellings of real configurations."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_core.target.architecture import RopeFacts, attention_facts, expert_facts, rope_facts

BASE = {"num_hidden_layers": 12, "num_attention_heads": 8, "hidden_size": 64}


def rope(**fields: Any) -> RopeFacts:
    return RopeFacts(
        **{"layers": "all", "kind": "default", "factor": None, "original_positions": None} | fields
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"rope_theta": 1e4}, [rope(theta=1e4)]),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
             "original_max_position_embeddings": 8192}},
            [rope(kind="llama3", theta=5e5, factor=8.0, original_positions=8192)],
        ),
        (
            {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 64.0,
             "original_max_position_embeddings": 4096, "mscale": 1.0}},
            [rope(kind="yarn", theta=5e4, factor=64.0, original_positions=4096)],
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
            [rope(kind="linear", theta=1e6, factor=2.0)],
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            [rope(layers="full_attention", kind="linear", theta=1e6, factor=8.0),
             rope(layers="sliding_attention", theta=1e4)],
        ),
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4,
             "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            [rope(layers="full_attention", kind="linear", theta=1e6, factor=8.0),
             rope(layers="sliding_attention", theta=1e4)],
        ),
        ({}, []),
    ],
    ids=["plain", "llama3", "yarn", "transformers5", "transformers5-by-kind", "gemma3", "none"],
)  # fmt: skip
def test_both_spellings_of_rope_are_read(text: dict[str, Any], expected: list[RopeFacts]) -> None:
    assert list(rope_facts(text)) == expected


@pytest.mark.parametrize(("kv_heads", "kind"), [(None, "mha"), (8, "mha"), (2, "gqa"), (1, "mqa")])
def test_heads_tell_the_kind_of_attention(kv_heads: int | None, kind: str) -> None:
    facts = attention_facts(BASE | {"num_key_value_heads": kv_heads})
    assert (facts.kind, facts.head_size, facts.layer_kinds) == (kind, 8, {"full_attention": 12})


def test_latent_attention_is_recognised_by_its_rank() -> None:
    mla = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "num_key_value_heads": 8}
    facts = attention_facts(BASE | mla)
    assert (facts.kind, facts.latent_size, facts.head_size) == ("mla", 576, 192)


@pytest.mark.parametrize(
    ("text", "window", "kinds"),
    [
        ({"sliding_window": 4096}, 4096, {"sliding_attention": 12}),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, {"full_attention": 12}),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 512,
         {"full_attention": 2, "sliding_attention": 10}),
        ({"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 6}, 128,
         {"full_attention": 6, "sliding_attention": 6}),
        ({"layer_types": ["linear_attention"] * 9 + ["full_attention"] * 3}, None,
         {"full_attention": 3, "linear_attention": 9}),
    ],
    ids=["mistral", "qwen2", "gemma3", "gpt-oss", "qwen3-next"],
)  # fmt: skip
def test_layers_are_counted_by_what_they_attend_to(
    text: dict[str, Any], window: int | None, kinds: dict[str, int]
) -> None:
    facts = attention_facts(BASE | text)
    assert (facts.sliding_window, facts.layer_kinds) == (window, kinds)


def test_experts_are_read_under_the_names_that_models_use() -> None:
    kimi = {
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }
    facts = expert_facts(kimi)
    assert facts is not None
    assert (facts.num_experts, facts.num_per_token, facts.num_shared, facts.num_dense_layers) == (
        384,
        8,
        1,
        1,
    )
    for name in ("num_local_experts", "num_experts"):
        facts = expert_facts({name: 32, "experts_per_token": 4})
        assert facts is not None
        assert (facts.num_experts, facts.num_per_token, facts.num_shared) == (32, 4, 0)
    assert expert_facts(BASE) is None
