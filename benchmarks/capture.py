"""Compares capture with plain prefill in the same engine, round by round: `python -m benchmarks.capture`.

Two processes hold an engine each, with the same target, token budget and number of sequences. One computes
random prompts of equal length and one new token (`plain`); the other also hashes and stores the states as
shards (`capture`), through the pipeline's own driver. They take turns with the same prompts after a round to
warm up, which is as long as the others: memory that a virtual machine touches for the first time is slow. A
round of capture ends when its last shard is on disk: in long rounds that last write weighs little, as in a
real capture.

`--shape` names random weights of that size, or the folder of a target. `--eager` leaves out compilation and
CUDA graphs in both engines, which saves a minute of loading. Where other work keeps the cores busy, start it
with `OMP_NUM_THREADS=1`: threads that wait for one another turn any disturbance into processor time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.capture_process import Worker
from benchmarks.capture_worker import WorkerSpec
from benchmarks.random_target import SHAPES, write_hollow_target
from eagle3_core.capture.job import CaptureJob, capture_layout
from eagle3_core.config import PROJECT_ROOT, RunConfig
from eagle3_core.host.engine_environment import engine_environment
from eagle3_core.store.dataset import DATASET_FILE, Sample, write_dataset
from eagle3_core.store.shards import PlannedShard, ShardLayout, plan_shards
from eagle3_core.target.info import inspect_target

MODES = ("plain", "capture")
SHARD_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
"""The default by device: on a GPU that of a profile, on a CPU several shards in a short round."""
GPU_SHARE = 0.42
"""Of the GPU's memory for each of the two engines."""


def make_prompts(num_prompts: int, num_tokens: int, vocab_size: int, repeats: int) -> list[list[Sample]]:
    """Random prompts for the warm-up round and each measured one; the last half of each carries loss."""
    random = np.random.default_rng(0)
    mask = (np.arange(num_tokens) >= num_tokens // 2).astype(np.uint8)
    return [
        [
            Sample(
                key=f"round-{number}-{index:05d}",
                kind="random",
                split="train",
                input_ids=random.integers(3, vocab_size, num_tokens).astype(np.int32),
                loss_mask=mask,
                prompt_length=num_tokens // 2,
                finish_reason="length",
            )
            for index in range(num_prompts)
        ]
        for number in range(1 + repeats)
    ]


def plan_rounds(
    prompts: Sequence[Sequence[Sample]], layout: ShardLayout, shard_bytes: int
) -> tuple[list[PlannedShard], list[tuple[int, int]]]:
    """The shards of all rounds, and each round's range of them: no shard belongs to two rounds."""
    shards: list[PlannedShard] = []
    ranges: list[tuple[int, int]] = []
    offset = 0
    for samples in prompts:
        first = len(shards)
        for planned in plan_shards(samples, layout, shard_bytes):
            start, end = planned.start + offset, planned.end + offset
            shards.append(replace(planned, index=len(shards), start=start, end=end))
        ranges.append((first, len(shards)))
        offset += len(samples)
    return shards, ranges


def make_config(options: argparse.Namespace, target: Path, folder: Path) -> RunConfig:
    """The settings of both engines."""
    capture = {
        "engine": options.engine,
        "shard_bytes": options.shard_bytes,
        "max_batched_tokens": options.batch_tokens or (2048 if options.device == "cpu" else 8192),
    }
    if options.attention_backend:
        capture["sglang_attention_backend"] = options.attention_backend
    document = {
        "name": "capture-benchmark",
        "target": {"model": str(target), "dtype": "bfloat16"},
        "capture": capture,
        "engine": {
            "python": sys.executable,
            "device": options.device,
            "tensor_parallel_size": options.tensor_parallel,
            "max_num_seqs": options.num_seqs,
            "max_model_len": options.prompt_tokens + 64,
            "gpu_memory_utilization": options.gpu_share,
            "gpu_kv_cache_gib": options.gpu_kv_cache_gib,
        },
        "workspace": str(folder),
    }
    return RunConfig.model_validate(document)


def prepare(options: argparse.Namespace, target: Path, folder: Path) -> Path:
    """Write prompts and the workers' spec below `folder`; returns the spec's file."""
    config, info = make_config(options, target, folder), inspect_target(target)
    prompts = make_prompts(options.num_prompts, options.prompt_tokens, info.vocab_size, options.repeats)
    dataset, stored = folder / "dataset", folder / "capture"
    for path in (dataset, stored):
        path.mkdir(parents=True, exist_ok=True)
    write_dataset(dataset / DATASET_FILE, [sample for samples in prompts for sample in samples])
    layout = capture_layout(config, info)
    shards, ranges = plan_rounds(prompts, layout, options.shard_bytes)
    job = CaptureJob(
        engine=options.engine, dataset_folder=str(dataset), folder=str(stored), layout=layout, shards=shards
    )
    spec = WorkerSpec(
        config=config,
        target_path=str(target),
        job=job,
        rounds=ranges,
        eager=options.eager,
        dummy=options.dummy,
    )
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json())
    return path


def measure(options: argparse.Namespace, target: Path, folder: Path) -> dict[str, Any]:
    """Load both engines one after the other, run the rounds in turn, and gather what they took."""
    spec = prepare(options, target, folder)
    environment = engine_environment(WorkerSpec.model_validate_json(spec.read_text()).config.engine)
    workers = {mode: Worker(spec, mode, environment) for mode in MODES}
    try:
        loaded = {mode: worker.ask("load") for mode, worker in workers.items()}
        idle = {mode: worker.peak_bytes for mode, worker in workers.items()}
        rounds: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for number in range(options.repeats + 1):
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                before = workers[mode].cpu_seconds()
                answer = workers[mode].ask(f"round {number}")
                answer["cpu_seconds"] = workers[mode].cpu_seconds() - before
                if number:
                    rounds[mode].append(answer)
            if number:
                print(round_line(number, *(rounds[mode][-1] for mode in MODES)), flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    return {
        "engine": loaded["capture"]["engine"],
        "device": loaded["capture"]["device"],
        "load_seconds": {mode: loaded[mode]["load_seconds"] for mode in MODES},
        "loaded_host_bytes": idle,
        "peak_host_bytes": {mode: workers[mode].peak_bytes for mode in MODES},
        "rounds": rounds,
        **summary(rounds),
    }


def round_line(number: int, plain: dict[str, Any], captured: dict[str, Any]) -> str:
    """What one round took, told when it is over."""
    return (
        f"round {number}: plain {plain['seconds']:.2f} s, capture {captured['seconds']:.2f} s "
        f"({captured['last_token_seconds']:.2f} s to the last token), "
        f"ratio {plain['seconds'] / captured['seconds']:.3f}"
    )


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds, and the ratio of each round of capture to the plain one beside it."""
    speeds = {mode: [taken["tokens"] / taken["seconds"] for taken in rounds[mode]] for mode in MODES}
    ratios = [c / p for c, p in zip(speeds["capture"], speeds["plain"], strict=True)]
    captured = rounds["capture"]
    cpu = {mode: sum(taken["cpu_seconds"] for taken in rounds[mode]) for mode in MODES}
    return {
        "tokens_per_second": {mode: statistics.median(speeds[mode]) for mode in MODES},
        "ratio": statistics.median(ratios),
        "round_ratios": ratios,
        "cpu_seconds": cpu,
        "stored_bytes": statistics.median(taken["stored_bytes"] for taken in captured),
        "num_shards": captured[0]["num_shards"],
        "most_in_flight": max(taken["most_in_flight"] for taken in captured),
        "last_write_seconds": statistics.median(t["seconds"] - t["last_token_seconds"] for t in captured),
    }


def print_table(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Show the result; on shared cores the ratio of processor times says most."""
    print(
        f"{result['engine']} on {result['device']}, {options.shape}: {options.repeats} rounds of "
        f"{options.num_prompts} prompts of {options.prompt_tokens:,} tokens"
        f"{', eager' if options.eager else ''}"
    )
    for mode in MODES:
        print(
            f"{mode:8s} {result['tokens_per_second'][mode]:10,.0f} tokens/s   host memory at most "
            f"{result['peak_host_bytes'][mode] / 2**30:.2f} GiB "
            f"({result['loaded_host_bytes'][mode] / 2**30:.2f} when loaded)"
        )
    by_round = ", ".join(f"{ratio:.3f}" for ratio in result["round_ratios"])
    print(f"ratio {result['ratio']:.3f} (by round {by_round})")
    if options.device == "cpu":
        used = result["cpu_seconds"]
        print(
            f"processor time {used['plain']:.1f} s and {used['capture']:.1f} s: "
            f"ratio {used['plain'] / used['capture']:.3f}"
        )
    print(
        f"stored {result['stored_bytes'] / 1e9:.2f} GB a round in {result['num_shards']} shards, at most "
        f"{result['most_in_flight']} in flight; the last one {result['last_write_seconds']:.2f} s after the "
        "last token"
    )


def find_target(options: argparse.Namespace, folder: Path) -> Path:
    """The target's folder; one of random weights is made, in a process of its own to free the GPU again."""
    if options.shape not in SHAPES:
        return Path(options.shape)
    target = folder / options.shape
    if options.dummy:
        write_hollow_target(SHAPES[options.shape], target)
        return target
    if not (target / "config.json").exists():
        command = [sys.executable, "-m", "benchmarks.random_target", options.shape, str(target)]
        subprocess.run([*command, "--device", options.device], check=True, cwd=PROJECT_ROOT)
    return target


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line, by default of this process's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--shape", default="smollm2", help=f"{', '.join(SHAPES)}, or a target's folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--num-prompts", type=int, default=8, help="prompts of a round")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds of each engine")
    parser.add_argument("--shard-bytes", type=int, help="256 MiB on the CPU, else 1 GiB")
    parser.add_argument("--batch-tokens", type=int, help="of an engine step; 2,048 on the CPU, else 8,192")
    parser.add_argument("--num-seqs", type=int, default=32, help="sequences at once")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that hold each engine's target")
    parser.add_argument("--gpu-share", type=float, default=GPU_SHARE, help="of its memory, for each engine")
    parser.add_argument("--gpu-kv-cache-gib", type=float, help="KV cache of vLLM; by default fills the share")
    parser.add_argument("--attention-backend", help="SGLang's, e.g. triton")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation and CUDA graphs")
    parser.add_argument("--dummy", action="store_true", help="vLLM makes up the weights of the named shape")
    parser.add_argument("--folder", type=Path, help="for target, prompts and shards; kept if it is named")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args(arguments)
    options.shard_bytes = options.shard_bytes or SHARD_BYTES[options.device]
    return options


def main() -> None:
    """Measure and print a table."""
    options = parse()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="eagle3-capture-")).absolute()
    try:
        result = measure(options, find_target(options, folder), folder)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print_table(options, result)
    if options.json:
        settings = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
        options.json.write_text(json.dumps(settings | result, indent=1))


if __name__ == "__main__":
    main()
