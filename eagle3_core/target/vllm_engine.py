"""Loads a target in vLLM, unpatched, for generation, capture and benchmark."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from eagle3_core.config import RunConfig
from eagle3_core.host.inspect import GIB

if TYPE_CHECKING:
    from vllm import LLM

logger = logging.getLogger(__name__)

AMX_WORKER = "eagle3_core.target.amx_worker.AmxWorker"


def load_vllm(config: RunConfig, target_path: str, **arguments: Any) -> LLM:
    """An in-process vLLM engine with the run's settings; `arguments` go to `vllm.LLM` and win.

    On the CPU the process must have been started with `engine_environment`'s variables.
    """
    from vllm import LLM

    engine = config.engine
    # A forked engine waits for ever in its first parallel loop if this process had one: GNU's OpenMP does not
    # outlive a fork. Steps compute before they load, if only to check a draft.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    settings: dict[str, Any] = {
        "model": target_path,
        "dtype": config.target.dtype,
        "trust_remote_code": config.target.trust_remote_code,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": engine.enforce_eager or engine.device == "cpu",
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if engine.device == "cuda":
        settings["gpu_memory_utilization"] = engine.gpu_memory_utilization
        if engine.gpu_kv_cache_gib is not None:
            settings["kv_cache_memory_bytes"] = round(engine.gpu_kv_cache_gib * GIB)
    else:
        settings["worker_extension_cls"] = AMX_WORKER
    started = time.monotonic()
    llm = LLM(**settings | arguments)
    logger.info("loaded %s in vLLM in %.1f s", target_path, time.monotonic() - started)
    return llm
