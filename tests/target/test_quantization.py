"""Quantisation in the spellings of real configurations, and parameters counted through it."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_core.target.files import TensorPlace
from eagle3_core.target.quantization import count_parameters, quantization_facts

KIMI_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
}


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (KIMI_INT4, ("compressed-tensors", "pack-quantized", 4, 32, (), KIMI_INT4["ignore"])),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
            ("fp8", "e4m3", 8, None, (128, 128), []),
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ("gptq", None, 4, 128, (), [])),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ("gptq", None, 8, None, (), [])),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["visual"]},
            ("awq", None, 4, 64, (), ["visual"]),
        ),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            ("mxfp4", None, 4, 32, (), ["lm_head"]),
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", None, 4, None, (), [])),
    ],
    ids=["kimi-int4", "deepseek-fp8", "gptq", "gptq-per-channel", "awq", "gpt-oss", "bitsandbytes"],
)
def test_method_bits_groups_and_exceptions_are_read(
    declared: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    for config, text in (({"quantization_config": declared}, {}), ({}, {"quantization_config": declared})):
        facts = quantization_facts(config, text, {})
        assert facts is not None
        *rest, left_out = facts.model_dump().values()
        assert (*rest, list(left_out)) == expected


def test_a_separate_file_of_modelopt_is_read() -> None:
    facts = quantization_facts(
        {}, {}, {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}
    )
    assert facts is not None
    assert (facts.method, facts.format, facts.bits, facts.group_size) == ("modelopt", "NVFP4", 4, 16)
    assert quantization_facts({}, {}, {}) is None


def test_packed_weights_count_as_the_parameters_that_they_hold() -> None:
    facts = quantization_facts({"quantization_config": KIMI_INT4}, {}, {})
    tensors = [
        TensorPlace(name=f"experts.0.up_proj.{name}", file="f", shape=shape, dtype=dtype)
        for name, shape, dtype in (
            ("weight_packed", (2048, 896), "I32"),
            ("weight_scale", (2048, 224), "BF16"),
            ("weight_shape", (2,), "I32"),
        )
    ]
    assert count_parameters(tensors, facts) == 2048 * 7168
    plain = TensorPlace(name="self_attn.o_proj.weight", file="f", shape=(64, 64), dtype="BF16")
    assert count_parameters([plain], facts) == count_parameters([plain], None) == 64 * 64


def test_fp8_weights_count_once_and_their_scales_not_at_all() -> None:
    facts = quantization_facts({"quantization_config": {"quant_method": "fp8"}}, {}, {})
    tensors = [
        TensorPlace(name="up_proj.weight", file="f", shape=(256, 128), dtype="F8_E4M3"),
        TensorPlace(name="up_proj.weight_scale_inv", file="f", shape=(2, 1), dtype="F32"),
    ]
    assert count_parameters(tensors, facts) == 256 * 128
