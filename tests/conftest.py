"""Each test file runs in the environments that have what it needs; the others do not collect it."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_core.host.engine_environment import SGLANG_CPU_PACKAGES, engine_environment
from eagle3_core.sections import EngineConfig
from tests.prefect_server import api, eagle3_command, prefect_home

__all__ = ["api", "eagle3_command", "prefect_home"]

REQUIREMENTS = {
    "pytest.mark.engine": "torch", "pytest.mark.orchestrator": "prefect", "pytest.mark.sglang": "sglang"
}  # fmt: skip
HAS_SGLANG = importlib.util.find_spec("sglang") is not None

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores it, and so would the runs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.get("EAGLE3_TEST_DEVICE") != "cuda":
    # Tensors are so small that a second thread only waits, and spins while it does; steps inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if importlib.util.find_spec("torch"):
    # Engines read these when they are imported; a step's process gets the same.
    device = "cuda" if os.environ.get("EAGLE3_TEST_DEVICE") == "cuda" else "cpu"
    engine = EngineConfig(device=device, kv_cache_gib=1)  # type: ignore[arg-type]
    if HAS_SGLANG:
        engine = engine.model_copy(update={"python": sys.executable})
        if device == "cpu":
            sys.path.append(str(SGLANG_CPU_PACKAGES))
    os.environ |= engine_environment(engine)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files marked for an environment other than this one; in that of SGLang, all but its own."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    if HAS_SGLANG and "pytest.mark.sglang" not in text:
        return True
    missing = [
        mark for mark, module in REQUIREMENTS.items() if mark in text and not importlib.util.find_spec(module)
    ]
    return True if missing else None


@pytest.fixture(scope="session", autouse=True)
def _own_reservations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests reserve no space of the host's runs, and see none of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
