"""Writes and checks the folder that vLLM loads: speculators' EAGLE-3 format.

Legend: H hidden size, D draft vocabulary, V target vocabulary.

    config.json         speculators' configuration; decoder layers, flags, auxiliary ids in vLLM's convention
    model.safetensors   bf16 weights; `d2t` [D] int64 and `t2d` [V] bool exactly when D < V; `embed_tokens`
                        only on request, in the target's own dtype

vLLM loads what it finds and leaves the rest uninitialised, takes a missing `norm_before_residual` for true,
and guesses missing auxiliary ids: so all of it is written, and read back before the artifact is complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_core.errors import ExportError
from eagle3_core.serving.draft import (
    AUX_IDS_KEY,
    FLAGS,
    LAYER_KEY,
    TrainedDraft,
    check_mapping,
    check_tensors,
    parameter_shapes,
    read_config,
    read_tensors,
)
from eagle3_core.store.files import atomic_file, write_atomic
from eagle3_core.target.info import TargetInfo

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
EMBEDDING_NAME = "embed_tokens.weight"
WEIGHT_DTYPE = "bfloat16"
LAYER_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings",
    "rms_norm_eps", "rope_parameters", "attention_bias", "attention_dropout", "initializer_range",
)  # fmt: skip
OPTIONAL_FIELDS = ("mlp_bias", "layer_types", "sliding_window", "use_sliding_window")
"""Written where the kind of layer has them."""


def write_vllm(
    folder: Path,
    draft: TrainedDraft,
    target: TargetInfo,
    *,
    verifier: str,
    num_speculative_tokens: int,
    include_embedding: bool,
) -> list[Path]:
    """Write the folder and return its files.

    Args:
        folder: created if missing.
        draft: what to export.
        target: the target it was trained for.
        verifier: hub id or path under which an engine finds the target.
        num_speculative_tokens: K that an engine uses when it is told nothing else.
        include_embedding: ship the target's embedding, bit for bit.
    """
    import torch
    from safetensors.torch import save

    from eagle3_core.target.weights import read_embedding

    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in draft.weights.items()}
    if draft.d2t is not None and draft.t2d is not None:
        tensors |= {"d2t": draft.d2t, "t2d": draft.t2d}
    if include_embedding:
        tensors[EMBEDDING_NAME] = read_embedding(target)
    config = vllm_config(draft, target, verifier, num_speculative_tokens)
    files = [folder / CONFIG_FILE, folder / WEIGHTS_FILE]
    write_atomic(files[0], json.dumps(config, indent=2, sort_keys=True) + "\n")
    with atomic_file(files[1]) as handle:
        handle.write(save(tensors, metadata={"format": "pt"}))
    return files


def vllm_config(
    draft: TrainedDraft, target: TargetInfo, verifier: str, num_speculative_tokens: int
) -> dict[str, Any]:
    """The content of `config.json`."""
    from transformers import LlamaConfig, Qwen3Config

    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[draft.layer["model_type"]]
    layer = kind(**draft.layer).to_dict()
    return {
        "architectures": ["Eagle3Speculator"],
        "dtype": WEIGHT_DTYPE,
        "draft_vocab_size": draft.config["draft_vocab_size"],
        AUX_IDS_KEY: list(draft.config[AUX_IDS_KEY]),
        "embed_requires_grad": False,
        **{flag: bool(draft.config[flag]) for flag in FLAGS},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": [target.architecture], "name_or_path": verifier},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": draft.config.get("speculators_version", "unknown"),
        "target_hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        LAYER_KEY: {
            **{field: layer[field] for field in LAYER_FIELDS},
            **{field: layer[field] for field in OPTIONAL_FIELDS if layer.get(field) is not None},
            "dtype": WEIGHT_DTYPE,
            "tie_word_embeddings": False,
        },
    }


def check_loadable(
    folder: Path, target: TargetInfo, aux_layer_ids: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Check that vLLM would load the folder as a complete draft of this target; returns its tensors.

    Raises:
        ExportError: files, flags, ids or tensors are missing, extra or of the wrong shape, the vocabulary
            mapping is inconsistent, or the draft does not fit the target.
    """
    config = read_config(folder / CONFIG_FILE)
    layer = config[LAYER_KEY]
    _check_fit(folder, config, target, aux_layer_ids)
    tensors = read_tensors(folder / WEIGHTS_FILE)
    shapes = parameter_shapes(config)
    if config["draft_vocab_size"] < layer["vocab_size"]:
        check_mapping(tensors, config["draft_vocab_size"], layer["vocab_size"], folder / WEIGHTS_FILE)
        shapes |= {"d2t": (config["draft_vocab_size"],), "t2d": (layer["vocab_size"],)}
    if EMBEDDING_NAME in tensors:
        shapes[EMBEDDING_NAME] = (layer["vocab_size"], layer["hidden_size"])
    check_tensors(tensors, shapes, folder / WEIGHTS_FILE)
    return tensors


def _check_fit(
    folder: Path, config: dict[str, Any], target: TargetInfo, aux_layer_ids: tuple[int, ...]
) -> None:
    layer = config[LAYER_KEY]
    found_and_expected = {
        "transformer_layer_config.vocab_size": (layer.get("vocab_size"), target.vocab_size),
        "transformer_layer_config.hidden_size": (layer.get("hidden_size"), target.hidden_size),
        "target_hidden_size": (config.get("target_hidden_size"), target.hidden_size),
        AUX_IDS_KEY: (tuple(config[AUX_IDS_KEY]), aux_layer_ids),
        "tie_word_embeddings": (config.get("tie_word_embeddings"), False),
    }
    wrong = [
        f"{key} is {found} instead of {expected}"
        for key, (found, expected) in found_and_expected.items()
        if found != expected
    ]
    missing = [field for field in LAYER_FIELDS if field not in layer]
    if missing:
        wrong.append(f"{LAYER_KEY} lacks {', '.join(missing)}")
    if config["draft_vocab_size"] > target.vocab_size:
        wrong.append(f"draft_vocab_size is {config['draft_vocab_size']:,} of {target.vocab_size:,}")
    if wrong:
        raise ExportError(
            f"{folder / CONFIG_FILE}: {'; '.join(wrong)}", remedy="export again for this target"
        )


def check_vllm(
    folder: Path,
    draft: TrainedDraft,
    target: TargetInfo,
    *,
    aux_layer_ids: tuple[int, ...],
    include_embedding: bool,
) -> None:
    """Read the folder back and compare it with what it was made from.

    Raises:
        ExportError: as `check_loadable`, or a flag or a tensor differs from the trained draft's, or the
            embedding is there without being asked for, missing, or not the target's.
    """
    import torch

    from eagle3_core.target.weights import read_embedding

    tensors = check_loadable(folder, target, aux_layer_ids)
    expected = {name: weight.to(torch.bfloat16) for name, weight in draft.weights.items()}
    if draft.d2t is not None and draft.t2d is not None:
        expected |= {"d2t": draft.d2t, "t2d": draft.t2d}
    if include_embedding:
        expected[EMBEDDING_NAME] = read_embedding(target)
    different = sorted(expected.keys() ^ tensors.keys())
    different += [
        name
        for name in sorted(expected.keys() & tensors.keys())
        if expected[name].dtype != tensors[name].dtype or not torch.equal(expected[name], tensors[name])
    ]
    config = read_config(folder / CONFIG_FILE)
    different += [flag for flag in FLAGS if config[flag] != draft.config[flag]]
    if different:
        raise ExportError(f"{folder} differs from the checkpoint in {', '.join(different)}")
