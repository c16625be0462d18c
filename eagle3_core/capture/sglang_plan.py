"""What SGLang is started with for a capture, and what is checked of a running engine; imports no SGLang.

Hooks are attached by module name. `layers` reads the outputs of decoder layers (and of the embedding for
capture id 0): a state is hidden + residual. `model` lets the model capture its own EAGLE-3
states by setting `layers_to_capture`, for targets whose layers return something else; its final state is what
the last norm adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eagle3_core.capture.job import CaptureJob, check_positions
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError
from eagle3_core.sections import SGLANG_MARGIN_TOKENS
from eagle3_core.store.files import write_atomic
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import source_layer

Variant = Literal["layers", "model"]
JOB_NAME = "sglang_job.json"
READY_NAME = "sglang_ready.json"
HOOKS = "eagle3_core.capture.sglang_hook"
INNER_MODELS = (
    "model", "language_model.model", "language_model", "model.language_model", "model.language_model.model",
    "thinker.model", "llm.model", "transformer",
)  # fmt: skip
"""Names under which SGLang's models hold the decoder; one of them has the layers."""
MODEL_VARIANT_ARCHITECTURES = frozenset({"DeepseekV4ForCausalLM", "LongcatFlashForCausalLM"})
"""Targets whose layers do not return hidden and residual."""
REQUIRED_SETTINGS: dict[str, Any] = {
    "disable_radix_cache": True,
    "disable_prefill_cuda_graph": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
    "enable_dp_attention": False,
    "enable_two_batch_overlap": False,
    "enable_mixed_chunk": False,
    "pp_size": 1,
    "dp_size": 1,
    "speculative_algorithm": None,
}
WHY = {
    "disable_radix_cache": "shared prefixes would have no states",
    "disable_prefill_cuda_graph": "hooks do not run in a graph",
    "enforce_disable_flashinfer_allreduce_fusion": "layers would return partial sums",
}


def variant_of(config: RunConfig, info: TargetInfo) -> Variant:
    """The way of capturing: what `capture.sglang_hooks` says, or what suits the architecture."""
    if config.capture.sglang_hooks != "auto":
        return config.capture.sglang_hooks
    return "model" if info.architecture in MODEL_VARIANT_ARCHITECTURES else "layers"


def num_checks(variant: Variant) -> int:
    """Requests before the first sample: the model's own capture begins after one."""
    return 2 if variant == "model" else 1


def hook_specs(job: CaptureJob, variant: Variant) -> list[dict[str, Any]]:
    """SGLang's `forward_hooks` for a job; writes the job where the hooks find it."""
    path = Path(job.folder) / JOB_NAME
    write_atomic(path, job.model_dump_json())
    common = {"job": str(path), "variant": variant}
    specs = [
        _spec(
            f"state {capture_id}",
            state_targets(capture_id, variant),
            "make_final_hook" if _is_from_norm(capture_id, job, variant) else "make_state_hook",
            common | {"capture_id": capture_id},
        )
        for capture_id in job.capture_ids
        if variant == "layers" or capture_id == job.layout.final_layer_id
    ]
    if variant == "model":
        specs.append(_spec("model", list(INNER_MODELS), "make_model_hook", common))
    return [*specs, _spec("batch", ["logits_processor", "*.logits_processor"], "make_batch_hook", common)]


def state_targets(capture_id: int, variant: Variant) -> list[str]:
    """Module names whose output holds a state; one of them must exist."""
    if variant == "model":
        return [f"{inner}.norm" for inner in INNER_MODELS]
    layer = source_layer(capture_id)
    if layer is None:
        return [f"{inner}.{name}" for inner in INNER_MODELS for name in ("embed_tokens", "wte")]
    return [f"{inner}.{name}.{layer}" for inner in INNER_MODELS for name in ("layers", "h")]


def _is_from_norm(capture_id: int, job: CaptureJob, variant: Variant) -> bool:
    return variant == "model" and capture_id == job.layout.final_layer_id


def _spec(name: str, targets: list[str], factory: str, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"eagle3 {name}",
        "target_modules": targets,
        "hook_factory": f"{HOOKS}:{factory}",
        "config": config,
    }


def engine_arguments(
    config: RunConfig, info: TargetInfo, job: CaptureJob, longest: int, variant: Variant
) -> dict[str, Any]:
    """Fields of SGLang's `ServerArgs` for a capture.

    Args:
        config: the run's.
        info: the target.
        job: what is captured.
        longest: tokens of the longest sample.
        variant: how states are read.

    Raises:
        CaptureError: a sample is too long for the target's positions.
    """
    check_positions(info, longest, SGLANG_MARGIN_TOKENS)
    engine, batch = config.engine, config.capture.max_batched_tokens
    arguments: dict[str, Any] = {
        "model_path": info.path,
        "dtype": config.target.dtype,
        "trust_remote_code": config.target.trust_remote_code,
        "skip_tokenizer_init": True,
        "enable_multimodal": False,  # samples are text: no image processor is loaded
        "context_length": longest + SGLANG_MARGIN_TOKENS,
        "chunked_prefill_size": batch,
        "max_prefill_tokens": batch,
        "max_running_requests": engine.max_num_seqs,
        "tp_size": engine.tensor_parallel_size,
        "device": engine.device,
        "disable_radix_cache": True,
        "disable_decode_cuda_graph": True,
        "disable_prefill_cuda_graph": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "random_seed": 0,
        "log_level": "warning",
        "forward_hooks": hook_specs(job, variant),
    }
    backend = config.capture.sglang_attention_backend
    if engine.device == "cuda":
        chosen = {"attention_backend": backend} if backend else {}
        return arguments | {"mem_fraction_static": engine.gpu_memory_utilization} | chosen
    pool = 2 * (longest + SGLANG_MARGIN_TOKENS + batch + engine.max_num_seqs)
    return arguments | {
        "attention_backend": backend or "torch_native",
        "max_total_tokens": pool,
        "sleep_on_idle": True,  # a scheduler that waits for requests would keep a core busy
    }


def check_settings(settings: Mapping[str, Any], longest: int) -> None:
    """Refuse a running engine that would return other rows than asked for, before any sample is sent.

    Args:
        settings: the engine's own server arguments.
        longest: tokens of the longest sample.

    Raises:
        CaptureError: names the first setting that does not fit.
    """
    for name, wanted in REQUIRED_SETTINGS.items():
        found = settings.get(name, wanted if wanted is None else "not a setting of this release")
        if found != wanted:
            reason = f": {WHY[name]}" if name in WHY else ""
            raise CaptureError(f"the SGLang engine runs with {name}={found}{reason}", expected=f"{wanted}")
    graphs = settings.get("cuda_graph_config") or {}
    prefill = graphs.get("prefill") if isinstance(graphs, Mapping) else getattr(graphs, "prefill", None)
    backend = prefill.get("backend") if isinstance(prefill, Mapping) else getattr(prefill, "backend", None)
    if backend not in (None, "disabled"):
        raise CaptureError(
            f"the SGLang engine runs prefill in CUDA graphs ({backend}): {WHY['disable_prefill_cuda_graph']}",
            expected="disabled",
        )
    room = settings.get("context_length")
    if room is not None and longest + SGLANG_MARGIN_TOKENS > room:
        raise CaptureError(
            f"the SGLang engine takes {room:,} tokens", expected=f"{longest + SGLANG_MARGIN_TOKENS:,}"
        )
