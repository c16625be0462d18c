"""A part of the host benchmark: training on all GPUs beside one, at the same global batch.

First the pipeline's own step `train`, as it trains a draft from a capture in a store: its speed and its share
of time waiting for data, and how far the loss curves of one rank and of all are apart. The first steps, in
which kernels are compiled, do not count. Then the optimizer step alone, on random states in memory, with the
time that sending takes (`train_ranks`).
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.host_parts import PartSpec, serve, tell
from benchmarks.random_target import SHAPES
from benchmarks.tiny_capture import AUX_IDS, TINY, CaptureSize, write_capture
from eagle3_core.artifacts import ArtifactPlan, ArtifactRef
from eagle3_core.config import PROJECT_ROOT, RunConfig
from eagle3_core.contracts import METRICS_FILE, StepSpec, TrainResult
from eagle3_core.host.process import run_step
from eagle3_core.identity import plan_labels
from eagle3_core.store.local import LocalStore
from eagle3_core.training.metrics_log import read_records

NUM_STEPS, FIRST_STEPS = 12, 2
"""Optimizer steps, and how many of them do not count for speed."""
STEP_SHAPES = {"8b": "llama-8b", "tiny": "cpu-small"}
SETTINGS: dict[str, dict[str, Any]] = {
    "8b": {"pack_tokens": 8192, "ttt_steps": 7, "learning_rate": 3e-4},
    "tiny": {"pack_tokens": 128, "ttt_steps": 3, "learning_rate": 3e-3},
}
ROUNDS = {"8b": ("--rounds", "4", "--warm-up", "1"), "tiny": ("--rounds", "2", "--warm-up", "0")}


def measure(spec: PartSpec) -> None:
    """Measure the step of the pipeline, then the optimizer step alone, each on one rank and on all."""
    counts = (1,) if spec.gpus == 1 else (1, spec.gpus)
    found: dict[str, Any] = {"packs": spec.gpus, "steps": [], "runs": []}
    started = time.perf_counter()
    root = Path(spec.folder)
    refs = write_capture(root, make_config(spec, root, 1), capture_size(spec.shape, spec.gpus))
    found["write_capture_seconds"] = time.perf_counter() - started
    tell(f"states of {NUM_STEPS} steps written in {found['write_capture_seconds']:.0f} s")
    for count in counts:
        found["runs"].append(train(spec, root, refs, count))
        spec.save(found)
    if spec.gpus > 1:
        found["curves"] = compare_curves(*(run["losses"] for run in found["runs"]))
    found["steps"] = steps_alone(spec, root)
    spec.save(found)


def steps_alone(spec: PartSpec, folder: Path) -> list[dict[str, Any]]:
    """What `benchmarks.train_ranks` finds for one rank and for all."""
    file = folder / "steps.json"
    arguments = [
        "--shape", STEP_SHAPES[spec.shape], "--device", spec.device, "--ranks", str(spec.gpus),
        "--ttt-steps", str(SETTINGS[spec.shape]["ttt_steps"]), *ROUNDS[spec.shape], "--json", str(file),
    ]  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.train_ranks", *arguments]
    subprocess.run(command, check=True, cwd=PROJECT_ROOT, stdin=subprocess.DEVNULL)
    steps = json.loads(file.read_text())
    assert isinstance(steps, list)
    for found in steps:
        speed = f"{found['tokens_per_second']:,.0f} tokens/s, {found['ms']:.0f} ms"
        tell(f"step alone, {found['ranks']} ranks: {speed}")
    return steps


def capture_size(shape: str, packs: int) -> CaptureSize:
    """States for all steps of so many full packs, in texts of equal length.

    Args:
        shape: of the benchmark.
        packs: of an optimizer step.
    """
    pack_tokens = SETTINGS[shape]["pack_tokens"]
    if shape == "tiny":
        length, target, draft_vocab, cycle = 32, TINY.shape, TINY.draft_vocab, TINY.cycle
    else:
        length, target, draft_vocab, cycle = 2048, SHAPES["llama-8b"], 32_000, 8192
    in_pack = pack_tokens // length
    return CaptureSize(
        shape=target,
        draft_vocab=draft_vocab,
        cycle=cycle,
        num_train=NUM_STEPS * packs * in_pack,
        num_heldout=in_pack,
        lengths=(length, length),
        prompt_tokens=length // 2,
        samples_of_shard=4 * in_pack,
    )


def make_config(spec: PartSpec, root: Path, count: int) -> RunConfig:
    """Settings of a training on so many ranks: one epoch, one evaluation at its end."""
    return RunConfig.model_validate(
        {
            "name": "host-training",
            "target": {"model": str(root / "target"), "aux_layer_ids": list(AUX_IDS)},
            "store": str(root / "store"),
            "workspace": str(root),
            "draft": {"vocab_size": capture_size(spec.shape, spec.gpus).draft_vocab},
            "train": SETTINGS[spec.shape]
            | {
                "num_epochs": 1,
                "packs_per_step": spec.gpus,
                "num_ranks": count,
                "checkpoint_every_seconds": 86_400.0,
            },
            "benchmark": {"num_prompts": 1},
            "engine": {"python": sys.executable, "device": spec.device},
            "limits": {"check_disk": False, "min_free_disk_gib": 0},
        }
    )


def train(spec: PartSpec, root: Path, refs: dict[str, ArtifactRef], count: int) -> dict[str, Any]:
    """Run the step `train` on so many ranks; returns its speed without the first steps, and its losses."""
    config = make_config(spec, root, count)
    plan = ArtifactPlan(kind="checkpoint", identity={"ranks": count})
    step = StepSpec(
        config=config,
        run_id=f"ranks-{count}",
        target_path=config.target.model,
        outputs={"checkpoint": plan, "labels": plan_labels(refs["capture"], refs["vocabulary"])},
        inputs=refs,
    )
    folder, started = root / step.run_id, time.perf_counter()
    result = run_step("train", step, engine=config.engine, folder=folder, on_line=print)
    assert isinstance(result, TrainResult)
    checkpoint = LocalStore(Path(config.store_path)).folder(plan.ref)
    records = read_records(checkpoint / METRICS_FILE)
    shutil.rmtree(checkpoint)
    found = {
        "ranks": count,
        "seconds": time.perf_counter() - started,
        "heldout_loss": result.epochs[-1].heldout_loss,
        **figures_of([record for record in records if record["type"] == "step"]),
    }
    tell(
        f"step train, {count} ranks: {found['tokens_per_second']:,.0f} tokens/s, "
        f"{found['data_wait_share']:.1%} waiting for data, last loss {found['losses'][-1]:.4f}, "
        f"{found['seconds']:.0f} s in all"
    )
    return found


def figures_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median tokens per second and share of time waiting for data after the first steps; all losses."""
    counted = records[FIRST_STEPS:]
    seconds = sum(record["seconds"] for record in counted)
    return {
        "tokens_per_second": statistics.median(record["tokens"] / record["seconds"] for record in counted),
        "data_wait_share": sum(record["data_wait_seconds"] for record in counted) / seconds,
        "mfu": counted[-1]["mfu"],
        "peak_memory_gb": counted[-1]["peak_memory_gb"],
        "step_seconds": [record["seconds"] for record in records],
        "losses": [record["loss"] for record in records],
        "grad_norms": [record["grad_norm"] for record in records],
    }


def compare_curves(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """How far two loss curves are apart at most, as such and beside the loss of the first."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return {
        "steps": len(apart),
        "fall": one[0] - one[-1],
        "largest_difference": max(apart),
        "largest_relative_difference": max(d / abs(a) for d, a in zip(apart, one, strict=True)),
    }


if __name__ == "__main__":
    serve(measure)
