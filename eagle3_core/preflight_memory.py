"""What preflight asks of memory: the host's and the GPUs', for engines and for training."""

from __future__ import annotations

from eagle3_core.capture.replica import num_replicas
from eagle3_core.config import RunConfig
from eagle3_core.errors import Eagle3Error, HostError
from eagle3_core.estimate.sizes import capture_bytes
from eagle3_core.estimate.workload import guess_samples
from eagle3_core.host.gpus import GpuMemory, gpu_memory, visible_gpus
from eagle3_core.host.inspect import GIB, inspect_host
from eagle3_core.memory import (
    check_gpus,
    check_host,
    check_training_gpus,
    need_on_gpu,
    need_on_host,
    training_on_gpu,
    training_on_host,
)
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.layers import resolve_aux_layer_ids
from eagle3_core.target.locate import target_folder
from eagle3_core.training.sharing import num_ranks


def check_memory(config: RunConfig) -> str:
    """The host's memory for the engines; says what was found.

    Raises:
        HostError: there is too little.
    """
    available = inspect_host().memory_available_bytes / GIB
    if available < config.limits.min_free_memory_gib:
        raise HostError(
            f"{available:.1f} GiB of memory are available",
            expected=f"at least limits.min_free_memory_gib = {config.limits.min_free_memory_gib:g}",
            remedy="end other programs, or lower the limit",
        )
    target = _target_if_there(config)
    if target is None:
        return f"{available:.1f} GiB available"
    need = need_on_host(config, target, _capture_bytes(config, target))
    check_host(need, int(available * GIB))
    return f"{available:.1f} GiB available, at least {need.total / GIB:.1f} needed"


def check_gpu_memory(config: RunConfig) -> str:
    """The GPUs' memory for the engines; says what was found.

    Raises:
        HostError: a GPU is too small, or others hold its memory.
    """
    if config.engine.device == "cpu":
        return "not needed"
    found, target = _gpus(config), _target_if_there(config)
    if found is None or target is None:
        return "not known: " + ("the target is not there yet" if found else "no driver answers")
    used = found[: num_replicas(config, [gpu.device for gpu in found]) * config.engine.tensor_parallel_size]
    need = need_on_gpu(config, target)
    check_gpus(config, need, used)
    return f"at least {need.total / GIB:.1f} GiB needed on each of {len(used)} GPUs"


def check_training_memory(config: RunConfig) -> str:
    """Memory of the host and of each GPU that trains; says what was found.

    Raises:
        HostError: there is too little.
        TrainingError: more ranks are named than there are GPUs.
    """
    target = _target_if_there(config)
    if target is None:
        return "not known: the target is not there yet"
    gpus = None if config.engine.device == "cpu" else _gpus(config)
    ranks = num_ranks(config, len(gpus)) if gpus else config.train.num_ranks or 1
    on_host = training_on_host(config, target, ranks)
    check_host(on_host, inspect_host().memory_available_bytes)
    found = f"at least {on_host.total / GIB:.1f} GiB needed on the host"
    if not gpus:
        return found
    on_gpu = training_on_gpu(config, target, ranks)
    check_training_gpus(on_gpu, gpus[:ranks])
    return f"{found}, {on_gpu.total / GIB:.1f} on each of {ranks} GPUs"


def _gpus(config: RunConfig) -> list[GpuMemory] | None:
    """Memory of the GPUs that the engine environment sees; None where no driver answers."""
    return gpu_memory(visible_gpus(config.engine.environment.get("CUDA_VISIBLE_DEVICES")))


def _target_if_there(config: RunConfig) -> TargetInfo | None:
    """The target, or None where the check of the target has more to say."""
    try:
        info = inspect_target(target_folder(config))
        resolve_aux_layer_ids(config.target.aux_layer_ids, info.num_layers)
    except Eagle3Error:
        return None
    return info


def _capture_bytes(config: RunConfig, target: TargetInfo) -> int:
    """Upper estimate of the whole capture, or 0 where the check of the prompts has more to say."""
    try:
        return capture_bytes(config, target, guess_samples(config, target.vocab_size))
    except Eagle3Error:
        return 0
