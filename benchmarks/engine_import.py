"""Imports what an engine needs before it knows what to load, and notes what that took."""

from __future__ import annotations

import functools
import importlib
import time
from pathlib import Path
from typing import Any

FRONT_ENDS = {"vllm": "LLM", "sglang": "Engine"}
"""What imports all that a program needs that runs an engine. vLLM's touches no GPU: processes are forked from
one that has imported it."""


@functools.cache
def import_engine(name: str) -> dict[str, Any]:
    """Import an engine, once in a process and all that are forked from it.

    Args:
        name: `vllm` or `sglang`.

    Returns:
        Engine with its version, seconds, seconds of the processor (far fewer say that files are slow), and
        whether compiled modules are kept (else each process compiles them).
    """
    started, used = time.perf_counter(), time.process_time()
    package = importlib.import_module(name)
    getattr(package, FRONT_ENDS[name])
    return {
        "engine": f"{name} {package.__version__}",
        "import_seconds": time.perf_counter() - started,
        "import_cpu_seconds": time.process_time() - used,
        "keeps_bytecode": Path(package.__cached__).exists(),
    }
