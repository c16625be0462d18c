"""The trained draft as export reads it: configuration, weights and vocabulary mapping.

Legend: H hidden size, A auxiliary layers, I MLP width, Q query width (heads x head size), KV key-value width,
D draft vocabulary, V target vocabulary.

Names are those of speculators' `Eagle3DraftModel`. Layer 0 reads the token's embedding beside the hidden
state, so its attention takes 2H; further layers are ordinary.

The vocabulary mapping on five target tokens, of which a draft of three keeps 1, 2 and 4:

    t2d        0 1 1 0 1            kept target tokens
    targets      1 2   4            of draft tokens 0, 1, 2
    d2t          1 1   2            targets - draft token
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_core.data.vocabulary import VOCABULARY_FILE
from eagle3_core.errors import ExportError

if TYPE_CHECKING:
    import torch

CHECKPOINT_WEIGHTS = "model.safetensors"
CHECKPOINT_CONFIG = "config.json"
MAPPING_NAMES = ("d2t", "t2d")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options that engines and speculators default differently, so they are always written."""
AUX_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
LAYER_KEY = "transformer_layer_config"
LAYER_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip


@dataclass(frozen=True)
class TrainedDraft:
    """A draft read from its artifacts.

    Attributes:
        config: speculators' configuration as a dictionary, every flag present.
        weights: parameters by name, shapes as `parameter_shapes` says.
        d2t: [D] int64 offsets, target = draft + d2t[draft]; None where D = V.
        t2d: [V] bool, target tokens in the draft vocabulary; None where D = V.
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    @property
    def layer(self) -> dict[str, Any]:
        """Configuration of the decoder layers."""
        return self.config[LAYER_KEY]


def read_draft(checkpoint: Path, vocabulary: Path) -> TrainedDraft:
    """Read a checkpoint and the vocabulary mapping that it was trained with.

    Args:
        checkpoint: folder of the checkpoint artifact.
        vocabulary: folder of the vocabulary artifact.

    Raises:
        ExportError: unreadable, a flag or the auxiliary ids missing, missing, extra, misshapen or non-finite
            weights, or a mapping that is inconsistent or another than the checkpoint's own.
    """
    config = read_config(checkpoint / CHECKPOINT_CONFIG)
    tensors = read_tensors(checkpoint / CHECKPOINT_WEIGHTS)
    own_mapping = {name: tensors.pop(name) for name in MAPPING_NAMES if name in tensors}
    check_tensors(tensors, parameter_shapes(config), checkpoint / CHECKPOINT_WEIGHTS)
    draft_size, target_size = config["draft_vocab_size"], config[LAYER_KEY]["vocab_size"]
    if draft_size == target_size:
        if any(bool((own_mapping[name].long() != int(name == "t2d")).any()) for name in own_mapping):
            raise ExportError(f"{checkpoint} maps a vocabulary of the target's own size {target_size:,}")
        return TrainedDraft(config, tensors, None, None)
    mapping = read_tensors(vocabulary / VOCABULARY_FILE)
    check_mapping(mapping, draft_size, target_size, vocabulary / VOCABULARY_FILE)
    for name, own in own_mapping.items():
        if own.shape != mapping[name].shape or bool((own.long() != mapping[name].long()).any()):
            raise ExportError(
                f"{name} of the checkpoint {checkpoint} differs from the vocabulary {vocabulary}",
                remedy="train again: the draft was trained with another vocabulary",
            )
    return TrainedDraft(config, tensors, mapping["d2t"].long(), mapping["t2d"].bool())


def read_config(path: Path) -> dict[str, Any]:
    """A speculators configuration in which nothing is left to an engine's default.

    Raises:
        ExportError: unreadable, not EAGLE-3 over Llama or Qwen3 layers, or a key missing.
    """
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ExportError(f"cannot read {path} ({error})", remedy="make that artifact again") from error
    needed = ("draft_vocab_size", AUX_IDS_KEY, LAYER_KEY, *FLAGS)
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise ExportError(
            f"{path} does not say {', '.join(missing)}",
            expected="every flag and the auxiliary layer ids, because engines guess what is missing",
        )
    no_sizes = [key for key in LAYER_SIZES if not isinstance(config[LAYER_KEY].get(key), int)]
    if no_sizes:
        raise ExportError(f"{LAYER_KEY} in {path} does not say {', '.join(no_sizes)}")
    kind = (config.get("speculators_model_type"), config[LAYER_KEY].get("model_type"))
    if kind not in (("eagle3", "llama"), ("eagle3", "qwen3")):
        raise ExportError(
            f"{path} describes {kind[0]} over {kind[1]} layers", expected="eagle3 over llama or qwen3"
        )
    return config


def parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter that the configured draft has; vocabulary mapping apart."""
    layer = config[LAYER_KEY]
    hidden, num_aux = layer["hidden_size"], len(config[AUX_IDS_KEY])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_aux * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (num_aux * hidden,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
    for index in range(layer["num_hidden_layers"]):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(layer, index).items()}
    return shapes


def _layer_shapes(layer: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    hidden, width = layer["hidden_size"], layer["intermediate_size"]
    head = layer.get("head_dim") or hidden // layer["num_attention_heads"]
    query, key_value = head * layer["num_attention_heads"], head * layer["num_key_value_heads"]
    attention_input = hidden if index else 2 * hidden
    outputs = {"q": query, "k": key_value, "v": key_value}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    shapes |= {f"self_attn.{name}_proj.weight": (rows, attention_input) for name, rows in outputs.items()}
    if index == 0:
        shapes["hidden_norm.weight"] = (hidden,)
    if layer.get("model_type") == "qwen3":
        shapes |= {f"self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
    if layer.get("attention_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": (rows,) for name, rows in outputs.items()}
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if layer.get("mlp_bias"):
        shapes |= {f"mlp.{name}_proj.bias": (width,) for name in ("gate", "up")}
        shapes["mlp.down_proj.bias"] = (hidden,)
    return shapes


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file.

    Raises:
        ExportError: missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"cannot read {path} ({error})", remedy="make that artifact again") from error


def check_tensors(tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Hold names, shapes and values of `tensors` against `shapes`.

    Raises:
        ExportError: names missing tensors, extra ones, wrong shapes and non-finite values.
    """
    problems = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    problems += [f"{name} does not belong there" for name in sorted(tensors.keys() - shapes.keys())]
    for name in sorted(shapes.keys() & tensors.keys()):
        tensor = tensors[name]
        if tuple(tensor.shape) != shapes[name]:
            problems.append(f"{name} has shape {tuple(tensor.shape)} instead of {shapes[name]}")
        elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            problems.append(f"{name} is not finite")
    if problems:
        raise ExportError(f"{path}: {'; '.join(problems)}")


def check_mapping(tensors: dict[str, torch.Tensor], draft_size: int, target_size: int, path: Path) -> None:
    """Check that d2t [D] and t2d [V] describe the same, increasing target tokens.

    Raises:
        ExportError: one is missing, has the wrong size, or they contradict each other.
    """
    import torch

    missing = [name for name in MAPPING_NAMES if name not in tensors]
    if missing:
        raise ExportError(
            f"{path} lacks {', '.join(missing)}",
            expected=f"the mapping of {draft_size:,} draft tokens to {target_size:,} target tokens",
        )
    d2t, t2d = tensors["d2t"], tensors["t2d"].bool()
    if d2t.is_floating_point() or tuple(d2t.shape) != (draft_size,) or tuple(t2d.shape) != (target_size,):
        raise ExportError(
            f"{path}: d2t is {d2t.dtype} {tuple(d2t.shape)}, t2d {tuple(t2d.shape)}",
            expected=f"integers ({draft_size},) and ({target_size},)",
        )
    kept = t2d.nonzero().flatten()
    if not torch.equal(kept, torch.arange(draft_size) + d2t.long()):
        raise ExportError(
            f"{path}: d2t does not lead to the {len(kept):,} target tokens that t2d marks",
            expected="target = draft + d2t[draft], increasing",
            remedy="make the vocabulary again: with a wrong mapping every proposal is another token",
        )
