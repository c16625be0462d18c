"""Environment variables of a step's process."""

from __future__ import annotations

import os
from pathlib import Path

from eagle3_core.config import PROJECT_ROOT, RunConfig, resolve_path
from eagle3_core.sections import EngineConfig

OPENMP_LIBRARY = "libiomp5.so"
SGLANG_CPU_PACKAGES = PROJECT_ROOT / "eagle3_core" / "capture" / "sglang_cpu"
"""Placeholders for packages that SGLang imports on the CPU without using them."""
SGLANG_CPU_VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_IS_FLASHINFER_AVAILABLE": "false"}


def engine_environment(engine: EngineConfig, inherited: dict[str, str] | None = None) -> dict[str, str]:
    """The variables with which an engine environment's interpreter is started.

    Offline for hubs (nothing is fetched behind the user's back), the checkout on the path, and on the CPU
    what vLLM or SGLang need there. `engine.environment` wins over all.
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
            "VLLM_CPU_KVCACHE_SPACE": str(engine.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        library = openmp_library(resolve_path(engine.python))
        if library is not None:
            variables["LD_PRELOAD"] = str(library)
        if has_sglang(resolve_path(engine.python)):
            variables |= SGLANG_CPU_VARIABLES
            variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], str(SGLANG_CPU_PACKAGES)])
    return variables | engine.environment


def openmp_library(python: Path) -> Path | None:
    """Intel's OpenMP runtime in the interpreter's environment; vLLM on the CPU is much slower without it."""
    library = python.parent.parent / "lib" / OPENMP_LIBRARY
    return library if library.is_file() else None


def capture_engine_config(config: RunConfig) -> EngineConfig:
    """The engine section with the interpreter that captures: `capture.python` where it is set."""
    python = config.capture.python
    return config.engine if python is None else config.engine.model_copy(update={"python": python})


def has_sglang(python: Path) -> bool:
    """Whether SGLang is installed in the interpreter's environment."""
    return any(python.parent.parent.glob("lib/python3*/site-packages/sglang/__init__.py"))
