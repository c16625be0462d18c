"""How vLLM lays captured states out in its cache, by version.

Legend: B blocks, T tokens of a block, L captured layers, H hidden size.

Read off vLLM's own releases: up to 0.28 the cache of captured states is [B, T, L, H] and the connector must
ask for the layout named NHD; from 0.29 on it is [B, L, T, H] and the name is LBNHC (in memory the tokens are
outermost both times).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import Version

from eagle3_core.errors import CaptureError

if TYPE_CHECKING:
    import torch

OLDEST_VERSION = Version("0.26.0")
LAYER_FIRST_VERSION = Version("0.29.0")


def required_layout_name(version: str) -> str:
    """The name of the cache layout that the connector must ask for.

    Raises:
        CaptureError: a version older than the oldest one known.
    """
    return "LBNHC" if _is_layer_first(version) else "NHD"


def token_first_view(
    cache: torch.Tensor, version: str, block_size: int, num_layers: int, hidden_size: int
) -> torch.Tensor:
    """A view [B, T, L, H] of the cache of captured states.

    Args:
        cache: the layer's cache as vLLM registered it.
        version: vLLM's.
        block_size: T of the cache group.
        num_layers: L, captured ids.
        hidden_size: H.

    Raises:
        CaptureError: the cache does not have the shape that this version is known to use.
    """
    layer_first = _is_layer_first(version)
    inner = (num_layers, block_size) if layer_first else (block_size, num_layers)
    if cache.ndim != 4 or tuple(cache.shape[1:]) != (*inner, hidden_size):
        raise CaptureError(
            f"vLLM {version} holds captured states as {tuple(cache.shape)}",
            expected=f"(blocks, {inner[0]}, {inner[1]}, {hidden_size}) for {num_layers} layers in blocks of "
            f"{block_size} tokens",
            remedy="use a vLLM release that this project was tried with",
        )
    return cache.transpose(1, 2) if layer_first else cache


def _is_layer_first(version: str) -> bool:
    parsed = Version(version)
    if parsed < OLDEST_VERSION:
        raise CaptureError(f"vLLM {version} is too old to capture states", expected=f">= {OLDEST_VERSION}")
    return parsed >= LAYER_FIRST_VERSION
