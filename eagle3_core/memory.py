"""How much memory a run's engines and its training need at least, and the refusal of a host that has less.

These are lower bounds from sizes that are known before loading: weights, KV cache, captured states, what the
optimizer keeps. Buffers come on top, so a host that passes may still be too small; one that is refused surely
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from eagle3_core.capture.job import MAX_SHARDS_IN_FLIGHT
from eagle3_core.config import RunConfig
from eagle3_core.errors import HostError
from eagle3_core.estimate.sizes import MOMENTS, draft_parameters
from eagle3_core.host.gpus import GpuMemory
from eagle3_core.host.inspect import GIB
from eagle3_core.identity import draft_vocab_size
from eagle3_core.store.shards import DTYPE_BYTES
from eagle3_core.target.architecture import FULL, SLIDING
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import resolve_aux_layer_ids

CHECKPOINT_COPIES = 2
"""One is written while the next is taken."""


class Need(BaseModel):
    """Bytes by part; what a part is called, and what helps where a host has too little."""

    model_config = ConfigDict(frozen=True)
    names: ClassVar[dict[str, str]]
    purpose: ClassVar[str] = ""
    host_remedy: ClassVar[str]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, part) for part in self.names)

    def __str__(self) -> str:
        sizes = {name: getattr(self, part) for part, name in self.names.items()}
        return " + ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in sizes.items() if size)


class MemoryNeed(Need):
    """The least memory of one engine, in bytes."""

    names = {"weights": "weights", "kv_cache": "KV cache", "states": "captured states"}
    host_remedy = (
        "end other programs, take a smaller target or a larger host, or lower engine.kv_cache_gib or "
        "capture.shard_bytes"
    )
    weights: int
    kv_cache: int
    states: int


class TrainingNeed(Need):
    """The least memory of a training on one GPU or on the host, in bytes."""

    names = {
        "state": "weights, gradients and optimizer state",
        "frozen": "frozen embeddings and LM heads",
        "copies": "checkpoint copies",
    }
    purpose = " for training"
    host_remedy = (
        "end other programs, lower draft.num_layers or draft.intermediate_size, or take a larger host"
    )
    state: int
    frozen: int
    copies: int


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
        kv_cache=caches * config.engine.kv_cache_gib * GIB,
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


def training_on_gpu(config: RunConfig, target: TargetInfo, num_ranks: int) -> TrainingNeed:
    """What training needs of each GPU: fp32 weights, gradients and optimizer state, and what is frozen.

    Args:
        config: the run's.
        target: its target.
        num_ranks: GPUs that train; they share the state unless `train.parallel` is ddp.
    """
    shares = 1 if config.train.parallel == "ddp" else num_ranks
    state, _ = _trained_bytes(config, target)
    return TrainingNeed(state=state // shares, frozen=_frozen_bytes(config, target), copies=0)


def training_on_host(config: RunConfig, target: TargetInfo, num_ranks: int) -> TrainingNeed:
    """What training needs of the host: two copies of what a checkpoint holds, and on the CPU all the rest.

    Args:
        config: the run's.
        target: its target.
        num_ranks: processes; on the CPU each has a whole draft.
    """
    state, saved = _trained_bytes(config, target)
    live = num_ranks if config.engine.device == "cpu" else 0
    return TrainingNeed(
        state=live * state, frozen=live * _frozen_bytes(config, target), copies=CHECKPOINT_COPIES * saved
    )


def _trained_bytes(config: RunConfig, target: TargetInfo) -> tuple[int, int]:
    """Of trained parameters: weights, gradients and optimizer state; and what of it is saved."""
    trained, _ = draft_parameters(config, target)
    moments = MOMENTS if config.train.optimizer == "adamw" else 1
    return 4 * trained * (2 + moments), 4 * trained * (1 + moments)


def _frozen_bytes(config: RunConfig, target: TargetInfo) -> int:
    """The target's embedding, the teacher's LM head and the draft's own where it is not trained, in fp32."""
    _, head = draft_parameters(config, target)
    teacher = draft_vocab_size(config, target) * target.hidden_size
    return 4 * (target.vocab_size * target.hidden_size + teacher + head)


def check_host(need: Need, available: int) -> None:
    """Refuse a host with too little memory.

    Raises:
        HostError: found and needed, by part.
    """
    if need.total > available:
        raise HostError(
            f"{available / GIB:.1f} GiB of memory are available",
            expected=f"at least {need.total / GIB:.1f} GiB{need.purpose} ({need})",
            remedy=need.host_remedy,
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


def check_training_gpus(need: TrainingNeed, gpus: Sequence[GpuMemory]) -> None:
    """Refuse GPUs that are too small to train the draft.

    Raises:
        HostError: names the GPU, what it has and what is needed.
    """
    for gpu in gpus:
        if need.total > gpu.total_bytes:
            raise HostError(
                f"GPU {gpu.device} has {gpu.total_bytes / GIB:.1f} GiB",
                expected=f"at least {need.total / GIB:.1f} GiB{need.purpose} ({need})",
                remedy="train on more GPUs with train.parallel: fsdp2, or lower draft.num_layers, "
                "draft.intermediate_size or draft.vocab_size",
            )
