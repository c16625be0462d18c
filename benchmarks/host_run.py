"""A part of the host benchmark: a short run of the shipped profile of SmolLM2 on all GPUs.

The pipeline's own stages, each with its step in a process as a task starts it: answers, capture with a
replica on each GPU, verification, training with a rank on each GPU, export, benchmark, cleanup.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.host_parts import PartSpec, serve, tell
from eagle3_core.config import RunConfig, Stage, load_profile
from eagle3_core.host.run_folder import create_run_folder, new_run_id
from eagle3_core.pipeline import Callbacks, StageOutcome, run_stage
from eagle3_core.target.info import inspect_target

PROFILE = "smollm2-135m-demo"
STAGES: tuple[Stage, ...] = ("prepare", "extract", "verify", "train", "export", "benchmark", "cleanup")
SHARDS_OF_A_REPLICA = 4
"""So many at least, or few GPUs would find work."""
GPU_SHARE = 0.4
"""Of a GPU's memory for an engine: a small target needs no more."""
TINY = {
    "limit": 24,
    "data.max_length": 512,
    "data.generation.max_tokens": 16,
    "capture.shard_bytes": 131_072,
    "train.num_epochs": 1,
    "benchmark.max_tokens": 8,
    "benchmark.num_prompts": 2,
    "benchmark.measure_speed": False,
}


def measure(spec: PartSpec) -> None:
    """Run the stages one after the other; what each has made is left as soon as it is there."""
    if spec.target is None:
        spec.save({"skipped": "no target was given (--target)"})
        return
    config = make_config(spec)
    run = create_run_folder(config, STAGES, new_run_id(config.name))
    found: dict[str, Any] = {"target": Path(spec.target).name, "stages": {}}
    for stage in STAGES:
        outcome = run_stage(stage, config, run.run_id, Callbacks(on_line=print))
        found["stages"][stage] = stage_figures(outcome)
        spec.save(found)
        tell(f"{stage}: {outcome.seconds:.1f} s, {outcome.message}")
    run.finish("completed")


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
        "engine.enforce_eager": True,
        "engine.gpu_memory_utilization": GPU_SHARE,
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
