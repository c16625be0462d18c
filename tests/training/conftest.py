"""One tiny random target for all training tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from eagle3_core.target.info import TargetInfo, inspect_target
from tests.tiny import make_tiny_target


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tensors here are so small that a second thread only waits."""
    if importlib.util.find_spec("torch"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    """Four layers, hidden size 64, tied embeddings, a final norm that is not all ones."""
    folder = make_tiny_target(
        tmp_path_factory.mktemp("tiny"),
        num_layers=4,
        hidden_size=64,
        intermediate_size=96,
        vocab_size=300,
        tokenizer_size=290,
        tied=True,
    )
    _set_norm(folder)
    return inspect_target(folder)


def _set_norm(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.linspace(0.5, 1.5, 64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
