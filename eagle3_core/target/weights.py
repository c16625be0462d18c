"""Reads single tensors of a target, and applies its final norm and LM head to stored states.

Legend: R rows, H hidden size, V vocabulary rows of the LM head.

A target of hundreds of gigabytes is not loaded for this: each tensor is memory-mapped out of the one
safetensors file that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eagle3_core.errors import TargetError
from eagle3_core.target.files import NOT_HERE, TensorPlace
from eagle3_core.target.info import TargetInfo

FLOAT_DTYPES = ("BF16", "F16", "F32")
HEAD_CHUNK_ROWS = 32768
"""Vocabulary rows of the LM head that are widened to fp32 at once."""

PLAIN_RMS_NORM_MODELS = frozenset(
    {
        "apertus", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "glm4",
        "glm4_moe", "gpt_oss", "kimi_k2", "llama", "llama4_text", "ministral", "mistral", "mixtral", "olmo2",
        "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    }
)  # fmt: skip
"""Model types whose logits are `lm_head(weight * x / rms(x))` with `rms_norm_eps` and nothing else.

Read off the modeling files of transformers 5.19 (`kimi_k2` loads as DeepSeek-V3). Not among them, because
they compute something else: Gemma and Qwen3-Next multiply by 1 + weight, Cohere and Nemotron have a
LayerNorm, Granite and Cohere scale the logits, Gemma squashes them.
"""


def read_tensor(info: TargetInfo, place: TensorPlace) -> torch.Tensor:
    """One tensor of a target, in its stored dtype.

    Raises:
        TargetError: the file is gone, was never here or is damaged, or the tensor is quantised.
    """
    path = Path(info.path) / place.file
    if place.dtype == NOT_HERE:
        raise TargetError(
            f"{place.name} of {info.path} cannot be read: its file is not here", remedy=f"fetch {place.file}"
        )
    if place.dtype not in FLOAT_DTYPES:
        raise TargetError(
            f"{place.name} in {path} is stored as {place.dtype}", expected=f"one of {', '.join(FLOAT_DTYPES)}"
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            tensor = file.get_tensor(place.name)
    except (OSError, SafetensorError) as error:
        raise TargetError(f"cannot read {place.name} from {path} ({error})") from error
    if tuple(tensor.shape) != place.shape:
        raise TargetError(
            f"{place.name} in {path} has shape {tuple(tensor.shape)}", expected=f"{place.shape} as inspected"
        )
    return tensor


def read_embedding(info: TargetInfo) -> torch.Tensor:
    """The input embedding, [V, H]."""
    return read_tensor(info, info.embedding)


def read_final_norm(info: TargetInfo) -> torch.Tensor:
    """The weight of the final norm, [H]."""
    return read_tensor(info, info.norm)


def read_lm_head(info: TargetInfo) -> torch.Tensor:
    """The LM head, [V, H]; the embedding where embeddings are tied."""
    return read_tensor(info, info.lm_head)


class FinalHead:
    """The target's final norm and LM head, which turn a final state (before the norm) into logits.

    Args:
        info: the target.
        device: where to compute.

    Raises:
        TargetError: the model type is not known to have a plain RMSNorm and an unscaled LM head.
    """

    def __init__(self, info: TargetInfo, device: torch.device | str = "cpu") -> None:
        self.eps = rms_norm_eps(info)
        self.device = torch.device(device)
        self.norm = read_final_norm(info).to(self.device, torch.float32)
        self.head = read_lm_head(info).to(self.device)

    def normalise(self, states: torch.Tensor) -> torch.Tensor:
        """RMSNorm in fp32: states [R, H] to [R, H]."""
        wide = states.to(self.device, torch.float32)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.norm

    def final_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits in fp32 of final states before the norm: [R, H] to [R, V]."""
        normal = self.normalise(states)
        logits = torch.empty(len(states), len(self.head), dtype=torch.float32, device=self.device)
        for start in range(0, len(self.head), HEAD_CHUNK_ROWS):
            rows = slice(start, start + HEAD_CHUNK_ROWS)
            torch.mm(normal, self.head[rows].float().T, out=logits[:, rows])
        return logits

    def chunks(self, states: torch.Tensor, rows: int = 512) -> Iterator[tuple[slice, torch.Tensor]]:
        """Logits of `rows` states at a time, with the slice of states that they belong to."""
        for start in range(0, len(states), rows):
            part = slice(start, min(start + rows, len(states)))
            yield part, self.final_logits(states[part])


def rms_norm_eps(info: TargetInfo) -> float:
    """The epsilon of the final RMSNorm.

    Raises:
        TargetError: the model type's final norm is not known, or its configuration has no epsilon.
    """
    if info.model_type not in PLAIN_RMS_NORM_MODELS:
        raise TargetError(
            f"the final norm and LM head of model type {info.model_type!r} are not known",
            expected=f"one of {', '.join(sorted(PLAIN_RMS_NORM_MODELS))}",
        )
    eps = info.text_config.get("rms_norm_eps")
    if not isinstance(eps, float | int):
        raise TargetError(f"{info.path}/config.json has no rms_norm_eps", expected="a number")
    return float(eps)
