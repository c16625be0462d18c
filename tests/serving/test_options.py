"""Draft options that a serving engine would ignore are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.errors import ConfigError
from eagle3_core.serving.options import check_served

OPTIONS: tuple[dict[str, Any], ...] = (
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"block": "qwen3"},
    {"sliding_window": 64},
    {"num_layers": 2},
)


def _config(draft: dict[str, Any], *serving: str) -> RunConfig:
    document = {"name": "a", "target": {"model": "m"}, "draft": draft, "export": {"serving": list(serving)}}
    return parse_config(document)


@pytest.mark.parametrize("draft", OPTIONS, ids=lambda draft: next(iter(draft)))
def test_what_sglang_ignores_is_refused_where_it_serves(draft: dict[str, Any]) -> None:
    (option,) = draft
    with pytest.raises(ConfigError, match=rf"draft\.{option} is .*, which SGLang 0\.5\.16 would ignore"):
        check_served(_config(draft, "sglang"))
    assert check_served(_config(draft)) == "the draft's options are known to vllm"


def test_defaults_and_what_both_know_are_served_by_both() -> None:
    for draft in ({}, {"fc_norm": True, "norm_output": True, "train_lm_head": True}):
        assert "vllm and sglang" in check_served(_config(draft, "sglang"))
