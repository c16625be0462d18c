"""Engines in processes of their own on the CPU: what the step's process may do, they have to ask for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.host.engine_environment import engine_environment
from eagle3_core.sections import EngineConfig
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

SECONDS = 300


def test_a_small_target_is_computed_in_a_process_of_the_engine(tmp_path: Path) -> None:
    """A processor with AMX ended it with an illegal instruction."""
    target = make_tiny_target(tmp_path / "target", num_layers=4, dtype="bfloat16")
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    environment = engine_environment(EngineConfig(device="cpu", kv_cache_gib=1, environment=own))

    done = subprocess.run(
        [sys.executable, "-m", "tests.target.engine_of_its_own", str(target)],
        capture_output=True, text=True, cwd=PROJECT_ROOT, env=environment, timeout=SECONDS,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 tokens" in done.stdout
