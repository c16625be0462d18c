"""The configuration of a miniature: the target's own, with smaller numbers. Needs no torch.

What decides how a layer computes stays: architecture and wrapper, attention kind, head sizes, the ranks of
latent attention, the kind of every layer, RoPE, normalisation, activation, biases. What only decides how much
is computed becomes small. Quantisation is left out: the probe asks which layer a state belongs to and which
request, and a quantised engine would answer that less sharply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from eagle3_core.errors import TargetError
from eagle3_core.target.info import NESTED_CONFIGS, text_config

NUM_LAYERS = 8
"""The fewest for which the default auxiliary ids differ from each other and from both ends."""
HIDDEN_SIZE = 256
WIDTH_UNIT = 64
NUM_HEADS = 8
NUM_LATENT_HEADS = 16
VOCAB_SIZE = 512
SLIDING_WINDOW = 64
MAX_POSITIONS = 4096
NUM_VISION_LAYERS = 2
LIMITS = {
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 16,
    "n_routed_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 128,
    "vocab_size": VOCAB_SIZE,
    "sliding_window": SLIDING_WINDOW,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
}
"""The greatest value of a field in a miniature; smaller ones stay. Widths fit the engines' kernels."""
REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
GO_ON = "set capture.probe to false to go on without a probe"
LEFT_OUT = (
    "quantization_config", "compression_config", "auto_map", "_name_or_path", "transformers_version",
    "torch_dtype", "dtype", "pad_token_id",
)  # fmt: skip
ADDED_WITHOUT_HEAD_DIM = ("llama", "mistral")
"""Models that read `head_dim` though their configurations usually leave it out."""
WRAPPERS = {"kimi_k25": "language_model."}
"""Multimodal wrappers that can be made small, by `model_type`: prefix of the language model's weights."""
VISION_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": NUM_VISION_LAYERS,
    "mm_hidden_size": 64,
    "projection_hidden_size": 64,
    "text_hidden_size": HIDDEN_SIZE,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
}


def miniature_config(config: dict[str, Any], tensor_parallel_size: int = 1) -> dict[str, Any]:
    """The configuration of a target's miniature.

    Args:
        config: the target's `config.json`.
        tensor_parallel_size: GPUs that attention heads must be divisible among.

    Raises:
        TargetError: a wrapper, or a language model, of which no miniature can be made.
    """
    text = text_config(config)
    small = _shrink_text(text, tensor_parallel_size)
    if text is config:
        return small
    model_type = config.get("model_type")
    if model_type not in WRAPPERS:
        raise TargetError(
            f"no miniature can be made of the wrapper {model_type}",
            expected=f"a plain causal language model, or one of {', '.join(WRAPPERS)}",
            remedy=GO_ON,
        )
    nested = next(key for key in NESTED_CONFIGS if config.get(key) is text)
    wrapper = {key: value for key, value in config.items() if key not in LEFT_OUT}
    vision = dict(config.get("vision_config") or {})
    for name, size in VISION_SIZES.items():
        # The published configuration and the engines' own name the same sizes differently.
        for spelling in (name, f"vt_{name}"):
            if spelling in vision or spelling == name:
                vision[spelling] = size
    return (
        wrapper
        | {
            nested: small,
            "vision_config": vision,
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
        }
        | {key: VOCAB_SIZE - 1 for key in config if key.endswith("_token_id") and "media" in key}
    )


def probe_layer_ids(num_layers: int, wanted: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The capture ids of a probe's two sessions: every layer, and a set of three as in a real run.

    Args:
        num_layers: N of the miniature.
        wanted: the run's auxiliary ids; id 0 is captured only if they have it, since not every model can.
    """
    first = 0 if wanted is not None and 0 in wanted else 1
    every = tuple(range(first, num_layers))
    middle = min(max(num_layers // 2, first + 1), num_layers - 2)
    return every, tuple(sorted({first if first == 0 else min(2, middle - 1), middle, num_layers - 1}))


def _shrink_text(text: dict[str, Any], tensor_parallel_size: int) -> dict[str, Any]:
    missing = [key for key in REQUIRED if not isinstance(text.get(key), int)]
    if missing:
        raise TargetError(
            f"no miniature can be made of a {text.get('model_type')}: its configuration has no "
            f"{', '.join(missing)}",
            remedy=GO_ON,
        )
    small = {key: value for key, value in text.items() if key not in LEFT_OUT}
    for key, limit in LIMITS.items():
        if isinstance(small.get(key), int):
            small[key] = min(small[key], limit)
    small["dtype"] = "bfloat16"
    small |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    small |= _attention(text, tensor_parallel_size)
    if not text.get("rope_scaling") and not (text.get("rope_parameters") or {}).get("factor"):
        # With scaled positions the number of positions is a part of the scale.
        positions = text.get("max_position_embeddings") or MAX_POSITIONS
        small["max_position_embeddings"] = min(positions, MAX_POSITIONS)
    return small | _layer_kinds(text)


def _attention(text: dict[str, Any], tensor_parallel_size: int) -> dict[str, Any]:
    """Few heads in the same groups, each of the same size."""
    heads = text["num_attention_heads"]
    if "kv_lora_rank" in text:
        count = math.lcm(min(heads, NUM_LATENT_HEADS), tensor_parallel_size)
        return {"num_attention_heads": count, "num_key_value_heads": count, "hidden_size": HIDDEN_SIZE}
    group = max(1, heads // (text.get("num_key_value_heads") or heads))
    key_heads = max(1, min(heads, NUM_HEADS) // group)
    while key_heads * group % tensor_parallel_size:
        key_heads += 1
    size = text.get("head_dim") or text["hidden_size"] // heads
    small = {"num_attention_heads": key_heads * group, "num_key_value_heads": key_heads}
    if "head_dim" in text or text.get("model_type") in ADDED_WITHOUT_HEAD_DIM:
        # transformers wants a multiple of the heads even where their size is given.
        unit = math.lcm(key_heads * group, WIDTH_UNIT)
        return small | {"head_dim": size, "hidden_size": -(-HIDDEN_SIZE // unit) * unit}
    return small | {"hidden_size": key_heads * group * size}


def _layer_kinds(text: dict[str, Any]) -> dict[str, Any]:
    """The first layers of the target, the last of them replaced where a kind would be missing."""
    count = min(text["num_hidden_layers"], NUM_LAYERS)
    small: dict[str, Any] = {"num_hidden_layers": count}
    if text.get("layer_types"):
        kinds = list(text["layer_types"])
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[:count]]
        small["layer_types"] = kinds[: count - len(missing)] + missing
    if text.get("mlp_only_layers"):
        small["mlp_only_layers"] = [layer for layer in text["mlp_only_layers"] if layer < count]
    if isinstance(text.get("max_window_layers"), int):
        small["max_window_layers"] = min(text["max_window_layers"], count // 2)
    return small
