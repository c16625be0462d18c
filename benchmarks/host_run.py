"""A part of the host benchmark: a short run of the shipped profile of SmolLM2 on all GPUs.

The pipeline's own stages, each with its step in a process as a task starts it: answers, capture with a
replica on each GPU, verification, training with a rank on each GPU, export, benchmark, cleanup. The first
ones run beside parts that import and load; then this part waits until the GPUs are its own.
"""

from __future__ import annotations

import math
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.host_parts import PartSpec, serve, tell
from benchmarks.host_signals import give, wait_for
from eagle3_core.config import RunConfig, Stage, load_profile
from eagle3_core.host.run_folder import create_run_folder, new_run_id
from eagle3_core.pipeline import Callbacks, StageOutcome, run_stage
from eagle3_core.target.info import inspect_target

PROFILE = "smollm2-135m-demo"
STAGES: tuple[Stage, ...] = ("prepare", "extract", "verify", "train", "export", "benchmark", "cleanup")
FIRST_LATE_STAGE: Stage = "verify"
SHARDS_OF_A_REPLICA = 8
"""So many at least, or few GPUs would find work."""
SHORT = {
    "limit": 256,
    "data.generation.max_tokens": 32,
    "train.num_epochs": 1,
    "benchmark.max_tokens": 32,
    "benchmark.num_prompts": 16,
    "benchmark.measure_speed": False,
}
"""A run takes its minutes to start processes: these settings leave little else."""
ON_GPU = {
    "engine.enforce_eager": True,
    "engine.gpu_memory_utilization": 0.1,
    "engine.gpu_kv_cache_gib": 4.0,
}
"""Engines load while others do, on the same GPU."""
TINY = {
    "limit": 24,
    "data.max_length": 512,
    "data.generation.max_tokens": 16,
    "capture.shard_bytes": 131_072,
    "benchmark.max_tokens": 8,
    "benchmark.num_prompts": 2,
    "engine.kv_cache_gib": 1,
}
LOADED = re.compile(r"^(?:\[\w+ \d+\] )?(\S+ \S+),\d+ \w \S+: loaded .+ in vLLM in ([\d.]+) s$", re.MULTILINE)
STARTED = re.compile(r"^# started (\S+ \S+) UTC$", re.MULTILINE)


def measure(spec: PartSpec) -> None:
    """Run the stages one after the other; what each has made is left as soon as it is there."""
    if spec.target is None:
        spec.save({"skipped": "no target was given (--target)"})
        return
    config = make_config(spec)
    run = create_run_folder(config, STAGES, new_run_id(config.name))
    found: dict[str, Any] = {"target": Path(spec.target).name, "stages": {}}
    for stage in STAGES:
        if stage == FIRST_LATE_STAGE:
            found["waited_seconds"] = wait_for_others(spec)
        outcome = run_stage(stage, config, run.run_id, Callbacks(on_line=print))
        log = run.log_path(stage)
        loads = engine_loads(log.read_text()) if log.is_file() else []
        found["stages"][stage] = stage_figures(outcome) | ({"engine_loads": loads} if loads else {})
        spec.save(found)
        tell(f"{stage}: {outcome.seconds:.1f} s, {outcome.message}")
    run.finish("completed")


def wait_for_others(spec: PartSpec) -> float:
    """Leave the GPUs to the other parts until they are over; returns seconds."""
    started = time.monotonic()
    give("early-stages-over", spec.common_folder)
    wait_for("other-parts-over", spec.common_folder, math.inf)
    return time.monotonic() - started


def engine_loads(log: str) -> list[dict[str, float]]:
    """What a step's log says of each engine of vLLM that was loaded: seconds from the step's start, which are
    importing for the most part, and seconds of loading."""
    started = STARTED.findall(log)
    if not started:
        return []
    began = datetime.fromisoformat(started[-1])
    loads = []
    for ended, seconds in LOADED.findall(log):
        load = float(seconds)
        before = (datetime.fromisoformat(ended) - began).total_seconds() - load
        loads.append({"seconds_before": before, "load_seconds": load})
    return loads


def make_config(spec: PartSpec) -> RunConfig:
    """The profile, on this many GPUs or processes and with the interpreter of this process."""
    assert spec.target is not None
    profile = load_profile(PROFILE)
    vocab_size = inspect_target(Path(spec.target)).vocab_size
    changes: dict[str, Any] = {
        "target.model": spec.target,
        "workspace": spec.folder,
        "draft.vocab_size": min(profile.draft.vocab_size or vocab_size, vocab_size // 2),
        "capture.replicas": spec.gpus,
        "capture.shard_bytes": int(profile.capture.shard_bytes) // SHARDS_OF_A_REPLICA,
        "train.packs_per_step": spec.gpus,
        "train.num_ranks": spec.gpus,
        "benchmark.min_acceptance_length": 1.0,
        "engine.python": sys.executable,
        "engine.device": spec.device,
        **SHORT,
        **ON_GPU,
        "limits.min_free_disk_gib": 0,
        "limits.reservations": str(Path(spec.folder) / "reservations"),
    }
    if spec.shape == "tiny":
        changes |= TINY
    return load_profile(PROFILE, [f"{name}={value}" for name, value in changes.items()])


def stage_figures(outcome: StageOutcome) -> dict[str, Any]:
    """What a stage took, and what it says of its speed and of the draft."""
    result = outcome.result
    names = ("tokens_per_second", "num_tokens", "num_shards", "num_steps", "data_wait_share", "speed_ratio")
    found = {name: result[name] for name in names if result.get(name) is not None}
    for name in ("acceptance", "replay"):
        if name in result:
            found["acceptance_length"] = result[name]["acceptance_length"]
    return {"seconds": outcome.seconds, "message": outcome.message, **found}


if __name__ == "__main__":
    serve(measure)
