"""Checks of host, engine environment, target and data before anything is loaded."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from eagle3_core.capture.replica import num_replicas, replica_variables
from eagle3_core.capture.vllm_support import check_embedding_state
from eagle3_core.config import STAGES, RunConfig, Stage
from eagle3_core.contracts import EngineInfoResult, EngineInfoSpec
from eagle3_core.data.conversations import read_prompts
from eagle3_core.errors import ConfigError, DataError, Eagle3Error, HostError, TargetError
from eagle3_core.host.engine_environment import openmp_library
from eagle3_core.host.engine_info import capture_versions, engine_versions
from eagle3_core.host.inspect import (
    GIB,
    check_loopback_port,
    check_writable,
    existing_parent,
    free_disk_bytes,
    inspect_host,
    refuse_taken_port,
)
from eagle3_core.host.process import engine_interpreter, run_step
from eagle3_core.identity import draft_vocab_size, prompt_files
from eagle3_core.preflight_memory import check_gpu_memory, check_memory, check_training_memory
from eagle3_core.sections import CAPTURE_MARGIN_TOKENS, SGLANG_MARGIN_TOKENS, EngineConfig
from eagle3_core.serving.options import check_served
from eagle3_core.store.open import open_store
from eagle3_core.store.remote import RemoteStore
from eagle3_core.target.fingerprint import TOKENIZER_VOCABULARIES
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.layers import resolve_aux_layer_ids
from eagle3_core.target.locate import is_builtin, target_folder
from eagle3_core.training.sharing import idle_gpus, num_ranks

DEVICE_QUERY_SECONDS = 180.0
TRAINING_MEMORY = "training memory"
ROW_FORMAT = 'JSONL rows like {"messages": [{"role": "user", "content": "..."}]}'


class Check(BaseModel):
    """One thing that was looked at."""

    model_config = ConfigDict(frozen=True)
    name: str
    ok: bool
    found: str


def run_checks(config: RunConfig, stages: Sequence[Stage] = STAGES) -> tuple[list[Check], Eagle3Error | None]:
    """All checks that are possible, and the first error.

    Args:
        config: the run's.
        stages: that will run; without `extract` nobody needs SGLang's port, without `train` no rank a GPU
            and nobody memory to train.
    """
    if "extract" not in stages:
        capture = config.capture.model_copy(update={"sglang_port": None})
        config = config.model_copy(update={"capture": capture})
    if "train" not in stages:
        train = config.train.model_copy(update={"num_ranks": None})
        config = config.model_copy(update={"train": train})
    checks: list[Check] = []
    first: Eagle3Error | None = None
    for name, check in CHECKS.items():
        if name == TRAINING_MEMORY and "train" not in stages:
            continue
        try:
            checks.append(Check(name=name, ok=True, found=check(config)))
        except Eagle3Error as error:
            first = first or error
            checks.append(Check(name=name, ok=False, found=str(error)))
    return checks, first


def check_combinations(config: RunConfig) -> str:
    """Settings that exclude each other.

    Raises:
        ConfigError: names both settings.
    """
    engine = config.engine
    if engine.device == "cpu" and engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"engine.tensor_parallel_size is {engine.tensor_parallel_size} on the CPU",
            remedy="set it to 1, or engine.device to cuda",
        )
    if config.data.max_length > engine.max_model_len:
        raise ConfigError(
            f"data.max_length is {config.data.max_length}, more than engine.max_model_len "
            f"{engine.max_model_len}",
            remedy="lower the first or raise the second",
        )
    if config.capture.engine == "vllm" and config.capture.max_batched_tokens < engine.max_num_seqs:
        raise ConfigError(
            f"capture.max_batched_tokens is {config.capture.max_batched_tokens}, less than "
            f"engine.max_num_seqs {engine.max_num_seqs}",
            expected="a token for every sequence of an engine step",
            remedy="raise the first or lower the second",
        )
    is_server = config.capture.engine == "sglang" and config.capture.sglang_port is not None
    if is_server and (config.capture.replicas or 1) > 1:
        raise ConfigError(
            f"capture.sglang_port is set with {config.capture.replicas} replicas",
            remedy="set capture.replicas to 1, or capture.sglang_port to null",
        )
    for name, tokens in {
        "benchmark.max_tokens": config.benchmark.max_tokens,
        "data.generation.max_tokens": config.data.generation.max_tokens,
    }.items():
        if tokens >= engine.max_model_len:
            raise ConfigError(
                f"{name} is {tokens}, which leaves no room for a prompt",
                expected=f"less than engine.max_model_len {engine.max_model_len}",
            )
    return "settings fit together"


def check_settings(config: RunConfig) -> None:
    """Whatever of the settings can be refused without an engine: combinations, layer ids, sizes, prompts.

    Raises:
        Eagle3Error: the first that does not fit.
    """
    for check in (check_combinations, check_served, _check_target, _check_prompts):
        check(config)


def _check_processors(config: RunConfig) -> str:
    return f"{inspect_host().num_cpus} processors"


def _check_disk(config: RunConfig) -> str:
    free = free_disk_bytes(config.store_path) / GIB
    if free < config.limits.min_free_disk_gib:
        raise HostError(
            f"{free:.1f} GiB are free at {existing_parent(config.store_path)}",
            expected=f"at least limits.min_free_disk_gib = {config.limits.min_free_disk_gib:g}",
            remedy="free some space or set `store` to a larger disk",
        )
    return f"{free:.1f} GiB free at {config.store_path}"


def _check_workspace(config: RunConfig) -> str:
    check_writable(config.workspace_path, "workspace")
    return f"{config.workspace_path} can be written"


def _check_store(config: RunConfig) -> str:
    """Write into the store; one in a bucket is written, read and deleted as uploads do it."""
    check_writable(config.store_path, "workspace" if config.object_root else "store")
    store = open_store(config)
    if isinstance(store, RemoteStore):
        return store.check_writable()
    return f"{config.store_path} can be written"


def _check_engine(config: RunConfig) -> str:
    versions = engine_versions(config.engine)
    return f"{versions.vllm}, torch {versions.packages['torch']}, Python {versions.python}"


def _check_capture_engine(config: RunConfig) -> str:
    """The environment and the port of the engine that captures."""
    versions = engine_versions(config.engine) if config.capture.python is None else capture_versions(config)
    port = config.capture.sglang_port
    if config.capture.engine == "sglang" and port is not None:
        refuse_taken_port(port)
    return f"{versions.capture_engine(config)}, torch {versions.packages['torch']}, Python {versions.python}"


def _check_openmp(config: RunConfig) -> str:
    if config.engine.device != "cpu":
        return "not needed"
    library = openmp_library(engine_interpreter(config.engine))
    return f"{library}" if library else "libiomp5 is not in the engine environment: vLLM will be slower"


def check_devices(config: RunConfig, engine: EngineConfig) -> list[str]:
    """Ask an engine environment for its GPUs; torch is imported there, no model is loaded.

    Args:
        config: the run's.
        engine: its engine section, with the interpreter to ask.

    Returns:
        Their names; none on the CPU.

    Raises:
        HostError: it sees fewer than one target needs.
        CaptureError: it sees fewer than the engines that capture need.
    """
    if config.engine.device == "cpu":
        return []
    info: EngineInfoResult = run_step(
        "engine_info",
        EngineInfoSpec(),
        engine=engine,
        folder=config.workspace_path / "cache" / "logs",
        timeout_seconds=DEVICE_QUERY_SECONDS,
    )
    wanted = config.engine.tensor_parallel_size
    if len(info.device_names) < wanted:
        raise HostError(
            f"the engine environment sees {len(info.device_names)} GPUs",
            expected=f"at least engine.tensor_parallel_size = {wanted}",
            remedy="set engine.device to cpu, or check driver, CUDA_VISIBLE_DEVICES and the build of torch",
        )
    replica_variables(config, num_replicas(config, info.device_names), info.device_names)
    return info.device_names


def _check_devices(config: RunConfig) -> str:
    """GPUs for the target, for each engine that captures and for each rank that trains."""
    names = check_devices(config, config.engine)
    num_ranks(config, len(names))
    return "; ".join(filter(None, (", ".join(names) or "the CPU", idle_gpus(config, len(names)))))


def _check_ports(config: RunConfig) -> str:
    check_loopback_port()
    return "a local port can be opened"


def _check_target(config: RunConfig) -> str:
    path = target_folder(config)
    if is_builtin(config.target.model) and not path.is_dir():
        return f"{config.target.model} will be fetched into {path}"
    target = inspect_target(path)
    check_readable(target)
    ids = resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers)
    if config.capture.engine == "vllm":
        check_embedding_state(target, ids)
    draft_vocab_size(config, target)
    longest = target.max_position_embeddings
    if longest is not None and config.engine.max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len is {config.engine.max_model_len}, but the target has {longest} positions",
            remedy="lower it",
        )
    _check_capture_room(config, longest)
    _check_heads(config, target)
    return f"{target.architecture}, {target.num_layers} layers, auxiliary ids {ids}, at {path}"


def _check_capture_room(config: RunConfig, positions: int | None) -> None:
    """Find out now, not after the answers were generated, that the longest sample cannot be captured."""
    margin = {"vllm": CAPTURE_MARGIN_TOKENS, "sglang": SGLANG_MARGIN_TOKENS}.get(config.capture.engine, 0)
    if margin and positions is not None and config.data.max_length + margin > positions:
        raise ConfigError(
            f"data.max_length is {config.data.max_length}, and the capture engine needs "
            f"{margin} tokens more, but the target has {positions} positions",
            remedy=f"set data.max_length to at most {positions - margin}",
        )


def _check_heads(config: RunConfig, target: TargetInfo) -> None:
    """Engines give each GPU as many attention heads, and refuse other numbers after minutes of loading."""
    size = config.engine.tensor_parallel_size
    heads = target.attention.num_heads if target.attention else None
    if heads is not None and heads % size:
        raise ConfigError(
            f"engine.tensor_parallel_size is {size}, but the target has {heads} attention heads",
            remedy="set it to a divisor of the heads",
        )


def check_readable(target: TargetInfo) -> None:
    """Whether a tokenizer is there and every weight file can be opened.

    Raises:
        TargetError: names the file.
    """
    folder = Path(target.path)
    for file in sorted({target.embedding.file, target.norm.file, target.lm_head.file}):
        if not os.access(folder / file, os.R_OK):
            raise TargetError(f"{folder / file} cannot be read", remedy="check its permissions")
    if not any((folder / name).is_file() for name in TOKENIZER_VOCABULARIES):
        raise TargetError(
            f"{folder} has no tokenizer", expected=f"one of {', '.join(TOKENIZER_VOCABULARIES)}"
        )


def _check_prompts(config: RunConfig) -> str:
    if config.data.capture is not None:
        return f"none: the run trains on {config.data.capture}"
    files = prompt_files(config)
    for file in files:
        if not os.access(file, os.R_OK):
            raise HostError(f"{file} cannot be read", remedy="check its permissions")
    found = read_prompts(files, config.data.heldout_fraction, config.limit, warn=False)
    names, rejected = ", ".join(str(file) for file in files), ""
    if found.rejected:
        first = found.rejected[0]
        rejected = f"{len(found.rejected):,} of {found.num_read:,} rows rejected (the first, {first.key}: "
        rejected += f"{first.reason})"
    if not found.prompts:
        raise DataError(f"no prompts in {names}: {rejected or 'it is empty'}", expected=ROW_FORMAT)
    allowed = config.data.max_rejected_fraction
    if config.limit is None and len(found.rejected) > allowed * found.num_read:
        raise DataError(
            f"{rejected}, of {names}",
            expected=f"at most {allowed:.0%}",
            remedy="correct the prompts or raise data.max_rejected_fraction",
        )
    splits = Counter(prompt.split for prompt in found.prompts)
    for split in ("train", "heldout"):
        if not splits[split]:
            raise DataError(
                f"none of the {len(found.prompts):,} prompts is in the split {split}, of {names}"
                + (f"; {rejected}" if rejected else ""),
                remedy="add prompts, or change data.heldout_fraction or the rows' `split`",
            )
    counted = f"{splits['train']:,} prompts to train on, {splits['heldout']:,} held out"
    if splits["heldout"] < config.benchmark.num_prompts:
        counted += f" (benchmark.num_prompts is {config.benchmark.num_prompts:,})"
    return f"{counted}{', ' if rejected else ''}{rejected}, of {names}"


CHECKS: dict[str, Callable[[RunConfig], str]] = {
    "settings": check_combinations,
    "draft options": check_served,
    "target": _check_target,
    "prompts": _check_prompts,
    "engine environment": _check_engine,
    "capture engine": _check_capture_engine,
    "openmp": _check_openmp,
    "devices": _check_devices,
    "processors": _check_processors,
    "memory": check_memory,
    "gpu memory": check_gpu_memory,
    TRAINING_MEMORY: check_training_memory,
    "disk": _check_disk,
    "folders": _check_workspace,
    "store": _check_store,
    "ports": _check_ports,
}
