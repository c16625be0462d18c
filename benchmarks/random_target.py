"""Writes a Llama-type target of random bf16 weights, for measurements that only need its size.

It has no tokenizer: prompts are token ids. Weights come in files of a few gigabytes with an index, and are
drawn on the GPU where there is one: 16 GB of random numbers take minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE_BYTES = 4 << 30
STANDARD_DEVIATION = 0.02


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a Llama-type decoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    positions: int = 8192
    tied: bool = False

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden // self.heads


SHAPES = {
    "tiny": TargetShape(128, 256, 8, 4, 2, 512),
    "smollm2": TargetShape(576, 1536, 30, 9, 3, 49_152, tied=True),
    "llama-8b": TargetShape(4096, 14336, 32, 32, 8, 128_256),
}


def weight_shapes(shape: TargetShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by name, in the order of the layers; norms have one dimension."""
    hidden, attention = shape.hidden, shape.heads * shape.head_dim
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (attention, hidden),
        "self_attn.k_proj": (shape.kv_heads * shape.head_dim, hidden),
        "self_attn.v_proj": (shape.kv_heads * shape.head_dim, hidden),
        "self_attn.o_proj": (hidden, attention),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (shape.intermediate, hidden),
        "mlp.up_proj": (shape.intermediate, hidden),
        "mlp.down_proj": (hidden, shape.intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for layer in range(shape.layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": sizes for name, sizes in of_layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab, hidden)
    return shapes


def target_config(shape: TargetShape) -> dict[str, object]:
    """The target's `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }


def group_files(shapes: dict[str, tuple[int, ...]], file_bytes: int) -> Iterator[list[str]]:
    """Names of the tensors of each file, in order, at most `file_bytes` of bf16 in one (one at least)."""
    names: list[str] = []
    filled = 0
    for name, sizes in shapes.items():
        size = 2 * math.prod(sizes)
        if names and filled + size > file_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    if names:
        yield names


def write_random_target(
    shape: TargetShape, folder: Path, device: str, file_bytes: int = FILE_BYTES, seed: int = 0
) -> None:
    """Write configuration, weights and their index to `folder`; linear weights are normal, norms are 1.

    Args:
        shape: sizes of the target.
        folder: made where it is missing.
        device: `cpu` or `cuda`: where the numbers are drawn.
        file_bytes: bytes of a weight file at most.
        seed: of the weights.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    shapes = weight_shapes(shape)
    groups = list(group_files(shapes, file_bytes))
    places: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        tensors = {}
        for name in names:
            weight = torch.ones(shapes[name], dtype=torch.bfloat16, device=device)
            if weight.ndim == 2:
                weight.normal_(0, STANDARD_DEVIATION, generator=generator)
            tensors[name] = weight.cpu()
        file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file_name)
    size = sum((folder / name).stat().st_size for name in set(places.values()))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    write_config(shape, folder)


def write_config(shape: TargetShape, folder: Path) -> None:
    """Write the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(target_config(shape), indent=1))


def write_hollow_target(shape: TargetShape, folder: Path) -> None:
    """Write a target for an engine that makes up weights: its file names them all and holds only a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, sizes in weight_shapes(shape).items():
        start, end = end, end + 2 * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": (start, end)}
    write_config(shape, folder)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)


def main() -> None:
    """Write the target that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    write_random_target(SHAPES[options.shape], options.folder, options.device)


if __name__ == "__main__":
    main()
