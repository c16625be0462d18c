"""Each test file runs in the environments that have what it needs; the others do not collect it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

REQUIREMENTS = {"pytest.mark.engine": "torch", "pytest.mark.orchestrator": "prefect"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files marked for an environment other than this one."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    missing = [
        mark for mark, module in REQUIREMENTS.items() if mark in text and not importlib.util.find_spec(module)
    ]
    return True if missing else None
