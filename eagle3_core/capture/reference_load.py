"""Loads a target's language model in transformers, out of a multimodal wrapper where there is one.

Three ways are tried, the next where transformers has no class for the last: the model as a causal LM, as a
wrapper for images and text, and the language model alone, built from the wrapper's nested configuration with
the weights whose names start with the wrapper's prefix. A weight that no file has would be random: refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from eagle3_core.errors import HostError, TargetError
from eagle3_core.host.inspect import GIB, inspect_host
from eagle3_core.memory import weight_bytes
from eagle3_core.target.info import TargetInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOWERS = ("vision", "visual", "audio", "image", "mm_projector", "multi_modal_projector", "speech")
"""Parts of module names that belong to other modalities than text."""
SAME_LANGUAGE_MODEL = {"kimi_k2": "deepseek_v3"}
"""Language models that transformers knows under another `model_type`."""
MAX_SHOWN = 4
MAX_REASON = 160

logger = logging.getLogger(__name__)


def load_reference(
    info: TargetInfo, dtype: str, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """The target in transformers, in `dtype`, on `device`, ready for inference.

    Raises:
        HostError: the device has less memory than the weights need.
        TargetError: transformers cannot load it in any of the ways, or weights are missing.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    check_room(info, dtype, device)
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code, "output_loading_info": True,
    }  # fmt: skip
    ways: dict[str, Callable[[], Any]] = {
        "a causal LM": partial(AutoModelForCausalLM.from_pretrained, info.path, **options)
    }
    if info.nested_under:
        ways["images and text"] = partial(AutoModelForImageTextToText.from_pretrained, info.path, **options)
        ways["its language model alone"] = partial(_load_text_alone, info, options)
    reasons = []
    for way, load in ways.items():
        try:
            model, loading = load()
            _refuse_missing(info, loading["missing_keys"])
        except (OSError, ValueError, ImportError, RuntimeError, KeyError, AttributeError) as error:
            reasons.append(f"as {way}: {' '.join(str(error).split())[:MAX_REASON]}")
            logger.info("transformers does not load %s as %s", info.path, way)
        else:
            logger.info("transformers loads %s as %s", info.path, way)
            return model.eval().to(device)
    raise TargetError(f"transformers cannot load {info.path} ({'; '.join(reasons)})")


def check_room(info: TargetInfo, dtype: str, device: torch.device) -> None:
    """Refuse a target whose weights are larger than the free memory of the device.

    Raises:
        HostError: found and needed.
    """
    needed = weight_bytes(info, dtype)
    if device.type == "cuda":
        where, free = "the GPU", torch.cuda.mem_get_info(device)[0]
    else:
        where, free = "the host", inspect_host().memory_available_bytes
    if needed > free:
        raise HostError(
            f"{where} has {free / GIB:.1f} GiB of memory free for the reference",
            expected=f"at least {needed / GIB:.1f} GiB for the weights of {info.path} in {dtype}",
            remedy="take a larger host, or set verify.reference_samples to 0 and capture with an engine",
        )


def _load_text_alone(info: TargetInfo, options: dict[str, Any]) -> Any:
    """The inner language model of a wrapper; its class is chosen by the nested `model_type`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = {key: value for key, value in info.text_config.items() if key != "model_type"}
    model_type = SAME_LANGUAGE_MODEL.get(info.model_type, info.model_type)
    config = AutoConfig.for_model(model_type, **text)
    return AutoModelForCausalLM.from_pretrained(
        info.path, config=config, key_mapping=inner_names(info), **options
    )


def inner_names(info: TargetInfo) -> dict[str, str]:
    """Patterns of a wrapper's weight names, and what the language model alone calls them.

    Read off the name of the final norm, which the language model calls `model.norm.weight`:

        language_model.model.norm.weight    language_model.            -> (nothing)
        model.language_model.norm.weight    model.language_model.      -> model.
    """
    *outer, holder, _, _ = ["", "", *info.norm.name.split(".")]
    start = ".".join([*outer, holder]).lstrip(".") + "."
    names = {f"^{re.escape(start)}(?!lm_head)": "model."}
    head = info.lm_head.name.removesuffix("lm_head.weight")
    if head and head != info.lm_head.name:
        names[f"^{re.escape(head)}lm_head"] = "lm_head"
    return names


def _refuse_missing(info: TargetInfo, missing: Iterable[str]) -> None:
    lost = sorted(name for name in missing if not any(tower in name for tower in TOWERS))
    if lost:
        shown = ", ".join(lost[:MAX_SHOWN])
        raise ValueError(f"{info.path} has no weights for {len(lost)} parameters, e.g. {shown}")


def find_decoder_layers(
    model: torch.nn.Module, num_layers: int, hidden_size: int | None = None
) -> torch.nn.ModuleList:
    """The list of the language model's decoder layers, which a wrapper may have beside others.

    Of lists named `layers` that are as long as the language model, those of towers of other modalities are
    left out, then those of another hidden size, then those outside a part called language or text model.

    Raises:
        TargetError: no such list, or several of which none is preferred.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and name.split(".")[-1] == "layers"
        and len(module) == num_layers
    }
    preferences: tuple[Callable[[str, torch.nn.ModuleList], bool], ...] = (
        lambda name, _: not any(tower in name for tower in TOWERS),
        lambda _, layers: hidden_size is None or hidden_size in _norm_widths(layers[0]),
        lambda name, _: "language_model" in name or "text_model" in name,
    )
    for prefers in preferences:
        if len(found) > 1:
            found = {name: layers for name, layers in found.items() if prefers(name, layers)} or found
    if len(found) != 1:
        raise TargetError(
            f"{type(model).__name__} has {len(found)} lists of {num_layers} layers ({', '.join(found)})",
            expected="one list of decoder layers",
        )
    return next(iter(found.values()))


def _norm_widths(layer: torch.nn.Module) -> set[int]:
    """Widths of a layer's norms; a norm of single heads is narrower than the residual stream."""
    return {
        weight.shape[0] for name, weight in layer.named_parameters() if weight.ndim == 1 and "norm" in name
    }
