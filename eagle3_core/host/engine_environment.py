"""Environment variables of a step's process."""

from __future__ import annotations

import os
from pathlib import Path

from eagle3_core.config import PROJECT_ROOT, EngineConfig, resolve_path

OPENMP_LIBRARY = "libiomp5.so"


def engine_environment(engine: EngineConfig, inherited: dict[str, str] | None = None) -> dict[str, str]:
    """The variables with which an engine environment's interpreter is started.

    Offline for hubs (nothing is fetched behind the user's back), the checkout on the path, and on the CPU
    what vLLM needs there. `engine.environment` wins over all.
    """
    variables = dict(os.environ if inherited is None else inherited)
    variables |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT_ROOT), variables.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if engine.device == "cpu":
        variables |= {
            "CUDA_VISIBLE_DEVICES": "",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(engine.kv_cache_gib))),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        library = openmp_library(resolve_path(engine.python))
        if library is not None:
            variables["LD_PRELOAD"] = str(library)
    return variables | engine.environment


def openmp_library(python: Path) -> Path | None:
    """Intel's OpenMP runtime in the interpreter's environment; vLLM on the CPU is much slower without it."""
    library = python.parent.parent / "lib" / OPENMP_LIBRARY
    return library if library.is_file() else None
