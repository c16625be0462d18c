"""Miniatures of targets: the same architecture with random weights, in the names of the real checkpoint.

Legend: H hidden size, V vocabulary, E experts, C token classes.

All linear weights keep the scale of what they read, so every layer adds about half of the residual stream's
norm, and the states of neighbouring layers are far apart (0.3 to 1 of their norm) against the rounding of
bf16 (0.01).

Rounding must not choose other experts than the reference does. So tokens belong to C classes: an embedding
has the direction of its class in it, and the router gives the experts of a class a large weight in that
direction. Eight experts, two for each token, four classes; a token of class 1 gets experts 2 and 3, far
before any other:

    token id        0      1      2      3      4
    class           0      1      2      3      0
    experts       0, 1   2, 3   4, 5   6, 7   0, 1
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3_core.capture.miniature_config import NUM_VISION_LAYERS, WRAPPERS
from eagle3_core.errors import TargetError
from eagle3_core.target.info import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "model.safetensors"
QUERY_SCALE = 1.25
"""Sharpens attention, so that a state depends on a few other tokens and not on the mean of all."""
ROUTER_GAIN = 1.0
CLASS_GAIN = 1.5
"""Of a token's class in its embedding, beside a random part of 1: it outweighs what layers add."""
NUM_CLASSES = 8
MEDIA_PROCESSOR = Path(__file__).with_name("media_processor.py")
PREPROCESSOR = {
    "auto_map": {"AutoImageProcessor": "media_processor.MiniatureMediaProcessor"},
    "image_processor_type": "MiniatureMediaProcessor",
    "media_proc_cfg": {
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 16384,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 512,
        "patch_size": 14,
        "temporal_merge_kernel_size": 4,
    },
}
"""What engines read of a wrapper's image processor when they load it."""
SAME_LANGUAGE_MODEL = {"kimi_k2": "deepseek_v3"}
"""Language models inside a wrapper that transformers knows under another `model_type`."""
ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight")


@dataclass(frozen=True)
class Miniature:
    """Where a miniature lies.

    Attributes:
        folder: what the engine loads: wrapped as the target is.
        text_folder: the language model alone, with the same weights, for the reference; the same folder
            where there is no wrapper.
    """

    folder: Path
    text_folder: Path


def make_miniature(config: dict[str, Any], folder: Path, seed: int = 0) -> Miniature:
    """Write a model of random bf16 weights and a tokenizer below `folder`.

    Args:
        config: of the miniature, from `miniature_config`.
        folder: emptied first.
        seed: of the weights.

    Raises:
        TargetError: the installed transformers does not know the architecture.
    """
    shutil.rmtree(folder, ignore_errors=True)
    text = text_config(config)
    is_wrapped = text is not config
    text = text | {"model_type": SAME_LANGUAGE_MODEL.get(text["model_type"], text["model_type"])}
    text_folder = folder / "text"
    model = _random_model(text, text_folder, seed)
    model.save_pretrained(text_folder, max_shard_size="10GB")
    _write_config(text_folder, text)
    _write_tokenizer(text_folder, text["vocab_size"])
    if not is_wrapped:
        return Miniature(text_folder, text_folder)
    wrapped = folder / "wrapped"
    wrapped.mkdir()
    _wrap(config, text_folder, wrapped, seed)
    shutil.copy(MEDIA_PROCESSOR, wrapped)
    (wrapped / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=1))
    _write_tokenizer(wrapped, text["vocab_size"])
    return Miniature(wrapped, text_folder)


def _random_model(text: dict[str, Any], folder: Path, seed: int) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    _write_config(folder, text)
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _randomise(model, text)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TargetError(f"transformers cannot make a {text.get('model_type')} ({reason})") from error
    return model.to(torch.bfloat16)


@torch.no_grad()
def _randomise(model: PreTrainedModel, text: dict[str, Any]) -> None:
    hidden = text["hidden_size"]
    for name, weight in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            continue
        if weight.ndim == 1 or name.endswith(("_bias", ".bias", ".sinks")):
            weight.add_(0.1 * torch.randn_like(weight))
        else:
            weight.copy_(torch.randn_like(weight) / _width_in(name, weight, hidden) ** 0.5)
        if "q_proj" in name or "q_b_proj" in name:
            weight.mul_(QUERY_SCALE)
    embedding = model.get_input_embeddings().weight
    embedding.copy_(torch.randn_like(embedding))
    routers = [weight for name, weight in model.named_parameters() if name.endswith(ROUTERS)]
    if routers:
        _route(embedding, routers, text)
    if str(text.get("model_type")).startswith("gemma"):
        embedding.div_(hidden**0.5)  # what the model multiplies it by
    head = model.get_output_embeddings().weight
    if head is not embedding:
        head.copy_(torch.randn_like(head) / hidden**0.5)


def _width_in(name: str, weight: torch.Tensor, hidden: int) -> int:
    """Number of inputs of a linear weight; stacked experts may be stored either way round."""
    if weight.ndim == 2:
        return weight.shape[1]
    return hidden if "gate_up" in name else weight[0].numel() // hidden


def _route(embedding: torch.Tensor, routers: list[torch.Tensor], text: dict[str, Any]) -> None:
    """Give each class of tokens [V] its experts in all routers [E, H]."""
    hidden = embedding.shape[1]
    directions = torch.linalg.qr(torch.randn(hidden, NUM_CLASSES)).Q.T
    classes = torch.arange(len(embedding)) % NUM_CLASSES
    embedding.add_(CLASS_GAIN * hidden**0.5 * directions[classes])
    for router in routers:
        router.mul_(0.25)
        for number, direction in enumerate(directions):
            for expert in chosen_experts(number, len(router), text):
                router[expert] += ROUTER_GAIN * direction


def chosen_experts(number: int, num_experts: int, text: dict[str, Any]) -> list[int]:
    """The experts of a token class: consecutive ones, evenly from as many groups as the model selects.

    Eight experts in four groups, of which two are selected, four for a token:

        class 0: 0 1 | 2 3 |     |            class 1:     | 2 3 | 4 5 |
    """
    count = text.get("num_experts_per_tok") or text.get("experts_per_token") or 1
    groups = text.get("n_group") or 1
    selected = (text.get("topk_group") or 1) if groups > 1 else 1
    size, each = num_experts // groups, count // selected
    start = number * each if groups == 1 else number // groups * each
    return [
        (number + group) % groups * size + (start + place) % size
        for group in range(selected)
        for place in range(each)
    ]


def _wrap(config: dict[str, Any], text_folder: Path, folder: Path, seed: int) -> None:
    """The language model's weights under the wrapper's names, with a small vision tower beside them."""
    from safetensors.torch import load_file, save_file

    prefix = WRAPPERS[config["model_type"]]
    tensors = {prefix + name: tensor for name, tensor in load_file(text_folder / WEIGHTS_FILE).items()}
    generator = torch.Generator().manual_seed(seed)
    hidden = text_config(config)["hidden_size"]
    for name, shape in kimi_vision_shapes(config["vision_config"], hidden).items():
        if name.endswith(".bias"):
            tensors[name] = torch.zeros(shape)
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * 0.02
        tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    _write_config(folder, config)


def kimi_vision_shapes(vision: dict[str, Any], text_hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Kimi-K2.5's vision tower and projector, as its checkpoint has them."""
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision.get("patch_size", 14)
    merge = vision.get("merge_kernel_size", (2, 2))
    merged = width * merge[0] * merge[1]
    grid = (vision["pos_emb_height"], vision["pos_emb_width"], width)
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": grid,
    }
    for block in (f"vision_tower.encoder.blocks.{index}" for index in range(NUM_VISION_LAYERS)):
        shapes |= _linear(f"{block}.wqkv", 3 * width, width) | _linear(f"{block}.wo", width, width)
        shapes |= _linear(f"{block}.mlp.fc0", inner, width) | _linear(f"{block}.mlp.fc1", width, inner)
        shapes |= _norm(f"{block}.norm0", width) | _norm(f"{block}.norm1", width)
    shapes |= _norm("vision_tower.encoder.final_layernorm", width) | _norm("mm_projector.pre_norm", width)
    shapes |= _linear("mm_projector.proj.0", merged, merged)
    return shapes | _linear("mm_projector.proj.2", text_hidden, merged)


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of one word for each id: engines load one though the probe sends ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    ).save_pretrained(folder)
