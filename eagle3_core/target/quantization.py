"""How a target's weights are quantised, and how many parameters they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.target.files import TensorPlace

CONFIG_KEYS = ("quantization_config", "compression_config")
LEFT_OUT_KEYS = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules", "exclude_modules", "exclude")
FIXED_BITS = {"fp8": 8, "mxfp4": 4, "fbgemm_fp8": 8, "modelopt_fp4": 4, "quanto": 8}
MXFP4_GROUP = 32
MODELOPT_BITS = {"NVFP4": 4, "FP8": 8, "W4A16_AWQ": 4, "W4A8_AWQ": 4}
CONTAINER_BITS = {"I32": 32, "U8": 8, "I8": 8}
PACKED_ENDINGS = (".weight_packed", ".qweight", "_blocks", ".weight")
NO_PARAMETERS = (
    "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "weight_shape",
    "weight_zero_point", "weight_g_idx", "input_scale", "input_global_scale", "output_scale", "k_scale",
    "v_scale", "scales", "qzeros", "g_idx", "_scales", "absmax", "quant_map", "nested_absmax",
    "nested_quant_map", "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4", "inv_freq",
)  # fmt: skip
"""Endings of tensors that accompany quantised weights and are no parameters of their own."""


class QuantizationFacts(BaseModel):
    """How weights are quantised."""

    model_config = ConfigDict(frozen=True)
    method: str = Field(description="`compressed-tensors`, `fp8`, `gptq`, `awq`, `mxfp4`, ...")
    format: str | None = Field(description="The method's own name of the encoding, e.g. `pack-quantized`.")
    bits: int | None = Field(description="Bits of a quantised weight; the least where there are several.")
    group_size: int | None = Field(description="Weights that share a scale.")
    block: tuple[int, ...] = Field(description="Rows and columns that share a scale, of block-wise methods.")
    left_out: tuple[str, ...] = Field(description="Modules kept as they are, by the configuration's names.")


def quantization_facts(
    config: Mapping[str, Any], text: Mapping[str, Any], modelopt: Mapping[str, Any]
) -> QuantizationFacts | None:
    """The quantisation that a configuration declares, or None.

    Args:
        config: the whole `config.json`.
        text: the language model's part of it.
        modelopt: `hf_quant_config.json`, empty where there is none.
    """
    declared = next(
        (part[key] for part in (config, text) for key in CONFIG_KEYS if isinstance(part.get(key), dict)),
        None,
    )
    if declared is None:
        declared = modelopt.get("quantization")
        if not isinstance(declared, dict):
            return None
        declared = {"quant_method": "modelopt"} | declared
    weights = list(_weight_groups(declared)) or [declared]
    left_out = next((declared[key] for key in LEFT_OUT_KEYS if declared.get(key)), ())
    method = str(declared.get("quant_method", "unknown"))
    return QuantizationFacts(
        method=method,
        format=declared.get("format") or declared.get("quant_algo") or declared.get("fmt"),
        bits=min((bits for part in weights if (bits := _bits(method, part))), default=None),
        group_size=_group_size(method, weights),
        block=tuple(declared.get("weight_block_size") or weights[0].get("block_structure") or ()),
        left_out=tuple(map(str, left_out)),
    )


def _weight_groups(declared: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    groups = declared.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            yield group["weights"]


def _bits(method: str, weights: Mapping[str, Any]) -> int | None:
    for key in ("num_bits", "bits", "w_bit", "weight_bits"):
        if isinstance(weights.get(key), int):
            return weights[key]
    if weights.get("load_in_4bit") or weights.get("_load_in_4bit"):
        return 4
    if weights.get("load_in_8bit") or weights.get("_load_in_8bit"):
        return 8
    return FIXED_BITS.get(method) or MODELOPT_BITS.get(str(weights.get("quant_algo")))


def _group_size(method: str, weights: Iterable[Mapping[str, Any]]) -> int | None:
    for part in weights:
        for key in ("group_size", "q_group_size"):
            if isinstance(part.get(key), int) and part[key] > 0:
                return part[key]
    return MXFP4_GROUP if method == "mxfp4" else None


def count_parameters(tensors: Iterable[TensorPlace], quantization: QuantizationFacts | None) -> int:
    """Parameters that the tensors stand for.

    Packed integers count as often as they hold a weight: an int32 holds eight weights of four bits. Scales,
    zero points and the like do not count.
    """
    bits = quantization.bits if quantization else None
    total = 0
    for place in tensors:
        if bits is not None and place.name.endswith(NO_PARAMETERS):
            continue
        count = prod(place.shape)
        container = CONTAINER_BITS.get(place.dtype)
        if bits and container and container > bits and place.name.endswith(PACKED_ENDINGS):
            count = count * container // bits
        total += count
    return total
