"""Position encoding, attention and experts of a target, read off its configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

ALL_LAYERS = "all"
SLIDING, FULL = "sliding_attention", "full_attention"


class RopeFacts(BaseModel):
    """Rotary position encoding of all layers, or of one kind of layer."""

    model_config = ConfigDict(frozen=True)
    layers: str = Field(description="`all`, or the kind of layer, e.g. `sliding_attention`.")
    kind: str = Field(description="`default`, `linear`, `dynamic`, `yarn`, `llama3`, ...")
    theta: float | None = Field(description="Base of the frequencies.")
    factor: float | None = Field(description="Scaling factor of the positions.")
    original_positions: int | None = Field(description="Positions before scaling.")


class AttentionFacts(BaseModel):
    """How the layers attend."""

    model_config = ConfigDict(frozen=True)
    kind: str = Field(description="`mha`, `gqa`, `mqa` or `mla`.")
    num_heads: int | None
    num_kv_heads: int | None
    head_size: int | None = Field(description="Of a key; of MLA, its two parts together.")
    latent_size: int | None = Field(description="MLA only: elements cached for each token and layer.")
    sliding_window: int | None = Field(description="Tokens; None where every layer attends to all.")
    layer_kinds: dict[str, int] = Field(description="Number of layers of each kind.")


class ExpertFacts(BaseModel):
    """Mixture of experts."""

    model_config = ConfigDict(frozen=True)
    num_experts: int
    num_per_token: int | None
    num_shared: int
    num_dense_layers: int = Field(description="First layers that have no experts.")


def rope_facts(text: Mapping[str, Any]) -> tuple[RopeFacts, ...]:
    """RoPE of a language model's configuration, in transformers 5's or the older spelling; empty without."""
    parameters = text.get("rope_parameters")
    if isinstance(parameters, dict) and parameters:
        if all(isinstance(value, dict) for value in parameters.values()):
            return tuple(_rope(kind, part, text) for kind, part in sorted(parameters.items()))
        return (_rope(ALL_LAYERS, parameters, text),)
    scaling = text.get("rope_scaling")
    if not scaling and text.get("rope_theta") is None:
        return ()
    local = text.get("rope_local_base_freq")
    if local is None:
        return (_rope(ALL_LAYERS, scaling or {}, text),)
    return (_rope(FULL, scaling or {}, text), _rope(SLIDING, {"rope_theta": local}, text))


def _rope(layers: str, part: Mapping[str, Any], text: Mapping[str, Any]) -> RopeFacts:
    kind = part.get("rope_type") or part.get("type") or "default"
    original = part.get("original_max_position_embeddings")
    if original is None and kind != "default":
        original = text.get("original_max_position_embeddings")
    return RopeFacts(
        layers=layers,
        kind=str(kind),
        theta=part.get("rope_theta", text.get("rope_theta")),
        factor=part.get("factor"),
        original_positions=original,
    )


def attention_facts(text: Mapping[str, Any]) -> AttentionFacts:
    """The attention of a language model's configuration."""
    heads = text.get("num_attention_heads")
    key_heads = text.get("num_key_value_heads") or heads
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    latent = text.get("kv_lora_rank")
    if latent:
        rope = text.get("qk_rope_head_dim") or 0
        head_size: int | None = (text.get("qk_nope_head_dim") or 0) + rope
        latent, kind = latent + rope, "mla"
    else:
        latent = None
        head_size = text.get("head_dim") or (text["hidden_size"] // heads if heads else None)
        kind = "mha" if key_heads == heads else "mqa" if key_heads == 1 else "gqa"
    return AttentionFacts(
        kind=kind,
        num_heads=heads,
        num_kv_heads=key_heads,
        head_size=head_size,
        latent_size=latent,
        sliding_window=window,
        layer_kinds=_layer_kinds(text, window),
    )


def _layer_kinds(text: Mapping[str, Any], window: int | None) -> dict[str, int]:
    """Layers by kind: as listed, or by the pattern that makes every n-th of sliding layers a full one."""
    layers = text["num_hidden_layers"]
    listed = text.get("layer_types")
    if isinstance(listed, list) and listed:
        return dict(sorted(Counter(map(str, listed)).items()))
    if window is None:
        return {FULL: layers}
    full = layers // text["sliding_window_pattern"] if text.get("sliding_window_pattern") else 0
    return {kind: count for kind, count in ((FULL, full), (SLIDING, layers - full)) if count}


def expert_facts(text: Mapping[str, Any]) -> ExpertFacts | None:
    """The experts of a language model's configuration, or None of a dense one."""
    count = _first(text, "n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    if not count:
        return None
    return ExpertFacts(
        num_experts=count,
        num_per_token=_first(text, "num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_k"),
        num_shared=_first(text, "n_shared_experts", "num_shared_experts") or 0,
        num_dense_layers=text.get("first_k_dense_replace") or 0,
    )


def _first(text: Mapping[str, Any], *names: str) -> int | None:
    return next((text[name] for name in names if isinstance(text.get(name), int)), None)
