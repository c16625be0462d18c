"""A target folder with a real configuration and real safetensors headers, far too small to run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def make_target(folder: Path, num_layers: int = 8, hidden_size: int = 16, vocab_size: int = 64) -> Path:
    """Write the folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {
        "model.embed_tokens.weight": np.zeros((vocab_size, hidden_size), np.float32),
        "model.norm.weight": np.ones(hidden_size, np.float32),
    }
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
