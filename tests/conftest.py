"""Each test file runs in the environments that have what it needs; the others do not collect it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from eagle3_core.config import EngineConfig
from eagle3_core.host.engine_environment import engine_environment

REQUIREMENTS = {"pytest.mark.engine": "torch", "pytest.mark.orchestrator": "prefect"}

if importlib.util.find_spec("torch"):
    # Engines read these when they are imported; a step's process gets the same.
    os.environ |= engine_environment(
        EngineConfig(
            device="cuda" if os.environ.get("EAGLE3_TEST_DEVICE") == "cuda" else "cpu", kv_cache_gib=1
        )
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files marked for an environment other than this one."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    missing = [
        mark for mark, module in REQUIREMENTS.items() if mark in text and not importlib.util.find_spec(module)
    ]
    return True if missing else None
