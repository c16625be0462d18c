"""Shared by the whole-run tests: the Prefect server of the flow tests, and a tiny target made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.tiny_run import make_tiny_target
from tests.flows.conftest import api, eagle3_command, prefect_home

__all__ = ["api", "eagle3_command", "prefect_home"]


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target, made in the engine environment."""
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")
