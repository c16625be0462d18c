"""Writes target folders that have real configurations and headers, and zeros for weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "I32": 4, "U8": 1, "F8_E4M3": 1}


def write_weights(
    path: Path, shapes: Mapping[str, list[int]], dtypes: Mapping[str, str] | None = None
) -> None:
    """A safetensors file of zeros; tensors are F32 unless `dtypes` says otherwise."""
    header, start = {}, 0
    for name, shape in shapes.items():
        dtype = (dtypes or {}).get(name, "F32")
        size = ELEMENT_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(start))


def write_sharded(folder: Path, config: dict[str, Any], files: Mapping[str, Mapping[str, list[int]]]) -> Path:
    """A target of several weight files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, shapes in files.items():
        write_weights(folder / name, shapes)
    weight_map = {tensor: name for name, shapes in files.items() for tensor in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "vocab_size": 16,
}
LLAMA_FILES = {
    "model-00001-of-00003.safetensors": {"model.embed_tokens.weight": [16, 8]},
    "model-00002-of-00003.safetensors": {"model.layers.0.mlp.up_proj.weight": [200, 8]},
    "model-00003-of-00003.safetensors": {"model.norm.weight": [8], "lm_head.weight": [16, 8]},
}
