"""How much memory a run's engines need at least, and the refusal of a host that has less.

These are lower bounds from sizes that are known before loading: weights, KV cache, captured states. Buffers
of the engine come on top, so a host that passes may still be too small; one that is refused surely is.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from eagle3_core.capture.job import MAX_SHARDS_IN_FLIGHT
from eagle3_core.config import RunConfig
from eagle3_core.errors import HostError
from eagle3_core.host.gpus import GpuMemory
from eagle3_core.store.shards import DTYPE_BYTES
from eagle3_core.target.architecture import FULL, SLIDING
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import resolve_aux_layer_ids

GIB = 1 << 30


class MemoryNeed(BaseModel):
    """The least memory of one engine, in bytes."""

    model_config = ConfigDict(frozen=True)
    weights: int
    kv_cache: int
    states: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv_cache + self.states

    def __str__(self) -> str:
        parts = {"weights": self.weights, "KV cache": self.kv_cache, "captured states": self.states}
        return " + ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in parts.items() if size)


def weight_bytes(target: TargetInfo, dtype: str) -> int:
    """Bytes of the loaded weights: as stored where quantised, otherwise all in the compute dtype."""
    if target.quantization_facts is not None or target.num_parameters is None:
        return target.weights_bytes
    return target.num_parameters * DTYPE_BYTES[dtype]


def kv_bytes(config: RunConfig, target: TargetInfo, tokens: int) -> int:
    """Bytes of keys and values of one sequence: two vectors a head, or one latent vector of MLA.

    Layers with a sliding window keep no more than the window, others that do not attend nothing.
    """
    attention = target.attention
    if attention is None:
        return 0
    width = attention.latent_size or 2 * (attention.num_kv_heads or 1) * (attention.head_size or 0)
    kept = {FULL: tokens, SLIDING: min(tokens, attention.sliding_window or tokens)}
    rows = sum(count * kept.get(kind, 0) for kind, count in attention.layer_kinds.items())
    return rows * width * DTYPE_BYTES[config.target.dtype]


def state_bytes_per_token(config: RunConfig, target: TargetInfo) -> int:
    """Bytes of the captured states of one token: the auxiliary layers and the final one."""
    layers = len(resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers)) + 1
    return layers * target.hidden_size * DTYPE_BYTES[config.target.dtype]


def need_on_host(config: RunConfig, target: TargetInfo, capture_bytes: int) -> MemoryNeed:
    """What the engines of a run need of the host's memory at once.

    Args:
        config: the run's.
        target: its target.
        capture_bytes: of the whole capture; shards in flight cannot be more.
    """
    replicas = config.capture.replicas or 1
    states = min(capture_bytes, replicas * MAX_SHARDS_IN_FLIGHT * int(config.capture.shard_bytes))
    if config.engine.device != "cpu":
        return MemoryNeed(weights=0, kv_cache=0, states=states)
    caches = 1 if config.capture.engine == "reference" else replicas
    return MemoryNeed(
        weights=replicas * weight_bytes(target, config.target.dtype),
        kv_cache=caches * int(config.engine.kv_cache_gib * GIB),
        states=states,
    )


def need_on_gpu(config: RunConfig, target: TargetInfo) -> MemoryNeed:
    """What an engine needs of each of its GPUs: its part of the weights, and the longest sequence.

    That is the longest sequence of the engine that answers, or the longest sample with its states in the one
    that captures. Keys and values are divided by heads, a latent vector and captured states are not.
    """
    tokens, parallel = config.engine.max_model_len, config.engine.tensor_parallel_size
    attention = target.attention
    heads = 1 if attention is None or attention.latent_size else attention.num_kv_heads or 1
    weights = weight_bytes(target, config.target.dtype) // parallel
    answering, capturing = (
        kv_bytes(config, target, count) // min(parallel, heads) for count in (tokens, config.data.max_length)
    )
    states = config.data.max_length * state_bytes_per_token(config, target)
    if answering > capturing + states:
        return MemoryNeed(weights=weights, kv_cache=answering, states=0)
    return MemoryNeed(weights=weights, kv_cache=capturing, states=states)


def check_host(need: MemoryNeed, available: int) -> None:
    """Refuse a host with too little memory.

    Raises:
        HostError: found and needed, by part.
    """
    if need.total > available:
        raise HostError(
            f"{available / GIB:.1f} GiB of memory are available",
            expected=f"at least {need.total / GIB:.1f} GiB ({need})",
            remedy="end other programs, take a smaller target or a larger host, or lower engine.kv_cache_gib "
            "or capture.shard_bytes",
        )


def check_gpus(config: RunConfig, need: MemoryNeed, gpus: Sequence[GpuMemory]) -> None:
    """Refuse GPUs that are too small for the target, or whose memory others hold.

    Raises:
        HostError: names the GPU, what it has and what is needed.
    """
    share = config.engine.gpu_memory_utilization
    for gpu in gpus:
        usable = int(gpu.total_bytes * share)
        if need.total > usable:
            raise HostError(
                f"GPU {gpu.device} has {gpu.total_bytes / GIB:.1f} GiB, of which the engine may use "
                f"{usable / GIB:.1f} (engine.gpu_memory_utilization {share:g})",
                expected=f"at least {need.total / GIB:.1f} GiB ({need})",
                remedy="raise engine.tensor_parallel_size, lower engine.max_model_len, or take a quantised "
                "target",
            )
        if gpu.free_bytes < usable:
            raise HostError(
                f"GPU {gpu.device} has {gpu.free_bytes / GIB:.1f} GiB free",
                expected=f"{usable / GIB:.1f} GiB, engine.gpu_memory_utilization {share:g} of "
                f"{gpu.total_bytes / GIB:.1f} (the target needs {need.total / GIB:.1f})",
                remedy="end the programs that hold its memory, choose others with CUDA_VISIBLE_DEVICES, or "
                "lower engine.gpu_memory_utilization",
            )
