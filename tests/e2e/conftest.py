"""Shared by the whole-run tests: a tiny target made once, and a workspace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.tiny_run import make_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target, made in the engine environment."""
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For profiles of one workspace: the answers and the probe that a run made, later ones reuse."""
    return tmp_path_factory.mktemp("tiny")
