"""Tiny models run on one thread: with more they only wait for each other when the host is busy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from eagle3_core.contracts import StepSpec


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> StepSpec:
    """A capture of ten greedy samples, one a shard; it stays as it is."""
    from tests.capture.damage import make_capture

    return make_capture(tmp_path_factory.mktemp("made"))


@pytest.fixture
def spec(made: StepSpec, tmp_path: Path) -> StepSpec:
    """A copy that a test may damage."""
    from tests.capture.damage import in_copied_store

    return in_copied_store(made, tmp_path)
