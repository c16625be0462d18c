"""Whether the installed vLLM can capture a target, seen from its model classes, before anything is loaded.

vLLM hands out a model's hidden states only where the model's class implements its EAGLE-3 interface; Gemma 3
does not. Otherwise the engine would fail after a long load. Imports without vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from eagle3_core.errors import CaptureError
from eagle3_core.target.info import TargetInfo

REMEDY = "set capture.engine to sglang or reference, or take a vLLM that supports it"


def check_embedding_state(info: TargetInfo, capture_ids: Sequence[int]) -> None:
    """Refuse capture id 0 where vLLM cannot give it: DeepSeek's code adds a residual that is not there yet.

    Raises:
        CaptureError: id 0 of a target with DeepSeek's latent attention or of a DeepSeek model type.
    """
    is_latent = info.attention is not None and info.attention.kind == "mla"
    if 0 in capture_ids and (is_latent or info.model_type.startswith("deepseek")):
        raise CaptureError(
            f"vLLM cannot capture id 0 (the embedding output) of {info.architecture}, a DeepSeek-type model",
            expected="auxiliary layer ids from 1 on",
            remedy="change target.aux_layer_ids, or set capture.engine to sglang or reference",
        )


def check_vllm_support(info: TargetInfo, capture_ids: Sequence[int]) -> None:
    """Refuse a target that the installed vLLM cannot capture.

    Raises:
        CaptureError: see `check_embedding_state` and `unsupported_reason`.
    """
    check_embedding_state(info, capture_ids)
    reason = unsupported_reason(info)
    if reason:
        raise CaptureError(reason, remedy=REMEDY)


def unsupported_reason(info: TargetInfo) -> str | None:
    """Why the installed vLLM has no hidden states of this target, or None.

    The classes of the wrapper and of the language model inside are both looked at. Of an architecture that
    vLLM has no class of its own for nothing is known here: transformers' classes may serve.
    """
    inner = info.text_config.get("architectures") or []
    for architecture in dict.fromkeys([info.architecture, *inner]):
        if _has_eagle3(architecture) is False:
            return f"vLLM {_version()} has no EAGLE-3 support, and so no hidden states, for {architecture}"
    return None


def _has_eagle3(architecture: str) -> bool | None:
    """Whether vLLM's class for an architecture gives hidden states; None without a class.

    Raises:
        CaptureError: the class cannot be imported.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    model = ModelRegistry.models.get(architecture)
    if model is None:
        return None
    try:
        return supports_eagle3(model.load_model_cls())
    except (ImportError, AttributeError, RuntimeError) as error:
        raise CaptureError(
            f"vLLM {_version()} cannot import its class for {architecture} ({error})", remedy=REMEDY
        ) from error


def _version() -> str:
    import vllm

    return vllm.__version__
