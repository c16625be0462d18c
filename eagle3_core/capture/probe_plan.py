"""What a probe is made of and what it is remembered by; needs no torch."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from eagle3_core.artifacts import canonical_json
from eagle3_core.capture.miniature_config import miniature_config
from eagle3_core.config import RunConfig
from eagle3_core.contracts import ProbeResult
from eagle3_core.errors import ConfigError
from eagle3_core.host.engine_info import EngineVersions
from eagle3_core.host.redaction import without_secrets
from eagle3_core.sections import Dtype
from eagle3_core.store.files import write_atomic
from eagle3_core.target.info import text_config

PROBE_VERSION = 1
"""Raised by hand when a probe asks something else, so that remembered answers are not used for it."""
PROBE_TIMEOUT_SECONDS = 300.0
ARCHITECTURES = Path(__file__).parent / "architectures"
MAX_TENSOR_PARALLEL = 8
GPU_MEMORY_UTILIZATION = {"vllm": 0.2, "sglang": 0.5, "reference": 0.2}
"""By engine. SGLang counts what others hold as part of its own share."""
MAX_BATCHED_TOKENS = 96
"""Of one engine step: less than the longest requests, so that prompts come in parts."""
WHOLE_BATCHED_TOKENS = 192
"""The same where prompts cannot come in parts."""


def known_architectures() -> dict[str, dict[str, Any]]:
    """Configurations of published models, by the name of their architecture."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(ARCHITECTURES.glob("*.json"))}


def known_architecture(name: str) -> dict[str, Any]:
    """The configuration of one of them.

    Raises:
        ConfigError: names those that there are.
    """
    known = known_architectures()
    if name not in known:
        raise ConfigError(f"no architecture {name!r}", expected=f"one of {', '.join(known)}")
    return known[name]


def architecture_run(
    engine: Literal["vllm", "sglang", "reference"], device: str, python: str = sys.executable
) -> RunConfig:
    """A run configuration for probing architectures of which no target is there; vLLM without compilation."""
    return RunConfig.model_validate(
        {
            "name": "probe",
            "target": {"model": "architecture"},
            "capture": {"engine": engine},
            "engine": {
                "python": python,
                "device": device,
                "gpu_memory_utilization": GPU_MEMORY_UTILIZATION[engine],
                "enforce_eager": True,
            },
        }
    )


def tensor_parallel_size(config: RunConfig) -> int:
    """GPUs that hold the miniature: those of the run, eight at most."""
    return min(config.engine.tensor_parallel_size, MAX_TENSOR_PARALLEL)


def probe_dtype(config: RunConfig) -> Dtype:
    """In which the engine computes."""
    return "bfloat16" if config.engine.device == "cuda" else "float32"


def probe_config(config: RunConfig, folder: str, small: dict[str, Any]) -> RunConfig:
    """The run's configuration with the miniature as target: small, sharp, and in parts.

    On the CPU the engine computes in fp32, where a right state is a hundred thousand times nearer than a
    wrong one; on a GPU in bf16, which all attention kernels take.

    Args:
        config: the run's.
        folder: of the miniature.
        small: its configuration.
    """
    is_gpu = config.engine.device == "cuda"
    # vLLM cannot compute latent attention in parts on the CPU.
    is_whole = not is_gpu and "kv_lora_rank" in text_config(small)
    batched_tokens = WHOLE_BATCHED_TOKENS if is_whole else MAX_BATCHED_TOKENS
    return config.model_copy(
        update={
            "target": config.target.model_copy(
                update={
                    "model": folder,
                    "revision": None,
                    "dtype": probe_dtype(config),
                    # The only code in a miniature is ours: the image processor of a wrapper.
                    "trust_remote_code": text_config(small) is not small,
                    "aux_layer_ids": None,
                }
            ),
            "capture": config.capture.model_copy(
                update={"max_batched_tokens": batched_tokens, "sglang_port": None}
            ),
            "engine": config.engine.model_copy(
                update={
                    "max_num_seqs": 8,
                    "kv_cache_gib": 1,
                    "tensor_parallel_size": tensor_parallel_size(config),
                    "gpu_memory_utilization": min(
                        GPU_MEMORY_UTILIZATION[config.capture.engine],
                        config.engine.gpu_memory_utilization,
                    ),
                }
            ),
        }
    )


def probe_key(config: RunConfig, target_config: dict[str, Any], versions: EngineVersions) -> str:
    """What an answer is remembered by: everything that could change it.

    Args:
        config: the run's.
        target_config: the target's `config.json`.
        versions: of the environment that captures.

    Raises:
        TargetError: a wrapper of which no miniature can be made.
    """
    document = {
        "probe": PROBE_VERSION,
        "engine": versions.capture_engine(config),
        "packages": {name: versions.packages.get(name) for name in ("torch", "transformers")},
        "device": config.engine.device,
        "enforce_eager": config.engine.enforce_eager,
        "environment": without_secrets(config).engine.environment,
        "reference_batching": config.capture.reference_batching,
        "sglang": [config.capture.sglang_hooks, config.capture.sglang_attention_backend],
        "tensor_parallel_size": tensor_parallel_size(config),
        "captures_embedding": 0 in (config.target.aux_layer_ids or ()),
        "miniature": miniature_config(target_config, tensor_parallel_size(config)),
    }
    return hashlib.sha256(canonical_json(document)).hexdigest()[:24]


def remembered(config: RunConfig, key: str) -> ProbeResult | None:
    """The answer of an earlier probe that was right; others are asked for again."""
    try:
        result = ProbeResult.model_validate_json(_path(config, key).read_bytes())
    except (OSError, ValidationError):
        return None
    return result if result.outcome == "ok" else None


def remember(config: RunConfig, key: str, result: ProbeResult) -> None:
    """Keep an answer in the workspace."""
    path = _path(config, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, result.model_dump_json(indent=1))


def _path(config: RunConfig, key: str) -> Path:
    return config.workspace_path / "cache" / "probes" / f"{key}.json"
