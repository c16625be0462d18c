from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from eagle3_core.config import RunConfig, parse_config
from tests.tiny import make_tiny_target

if TYPE_CHECKING:
    from vllm import LLM

MAX_MODEL_LEN = 128


@pytest.fixture(scope="package")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="package")
def make_config(tiny_target: Path) -> Callable[..., RunConfig]:
    """A configuration for the tiny target; sections given as keywords are merged in."""

    def make(workspace: Path, **sections: Any) -> RunConfig:
        document: dict[str, Any] = {
            "name": "test",
            "target": {"model": str(tiny_target), "dtype": "float32", "aux_layer_ids": [2, 4, 5]},
            "data": {"generation": {"max_tokens": 24}},
            "draft": {"vocab_size": 64},
            "engine": {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8},
            "workspace": str(workspace),
        }
        for name, values in sections.items():
            document[name] = document.get(name, {}) | values if isinstance(values, dict) else values
        return parse_config(document)

    return make


@pytest.fixture(scope="package")
def engine(
    tiny_target: Path, make_config: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory
) -> LLM:
    """The tiny target in vLLM, loaded once for all tests of this folder."""
    from eagle3_core.target.vllm_engine import load_vllm

    return load_vllm(make_config(tmp_path_factory.mktemp("engine")), str(tiny_target))
