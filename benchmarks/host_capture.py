"""Parts of the host benchmark: capture beside plain prefill, with an engine on each GPU and one on all.

Of both modes an engine is loaded on every GPU. After a round to warm up, in which all work, rounds of one
engine and of all of them take turns, plain and capturing; a round of all has an equal number of prompts for
each engine and ends when the slowest has stored its last shard. Then one engine of each mode holds the target
on all GPUs together (tensor parallel).

The part `mla` does the same with a miniature of DeepSeek-V3 (latent attention, experts).
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.capture import MODES, find_target, parse, prepare
from benchmarks.capture_process import Worker, ask_all, close_all
from benchmarks.capture_worker import WorkerSpec
from benchmarks.host_parts import PartSpec, serve, tell
from eagle3_core.capture.replica import replica_variables
from eagle3_core.host.engine_environment import engine_environment

REPEATS = 3
"""Measured rounds of each kind."""
SIZES = {
    ("capture", "8b"): ("llama-8b", 2048, 48),
    ("capture", "tiny"): ("tiny", 256, 24),
    ("mla", "8b"): ("deepseek-v3", 1024, 128),
    ("mla", "tiny"): ("deepseek-v3", 128, 16),
}
"""Target, tokens of a prompt and prompts of an engine in a round, by part and shape."""


def measure(spec: PartSpec) -> None:
    """Measure replicas, then tensor parallel if there are several GPUs."""
    shape, num_tokens, num_prompts = SIZES[spec.name, spec.shape]
    folder = Path(spec.folder)
    found: dict[str, Any] = {"target": shape, "prompt_tokens": num_tokens, "num_prompts": num_prompts}
    options = _options(spec, num_tokens, num_prompts)
    target = make_miniature(spec, folder) if spec.name == "mla" else find_target(options(1, shape), folder)
    spec.save(found)
    found["replicas"] = measure_engines(spec, options(1, str(target)), folder / "replicas", spec.gpus)
    spec.save(found)
    if spec.gpus == 1:
        found["tensor_parallel"] = {"skipped": "one GPU: the same as one replica"}
        tell("tensor parallel: one GPU, the same as one replica")
    else:
        parallel = options(spec.gpus, str(target))
        found["tensor_parallel"] = measure_engines(spec, parallel, folder / "tensor-parallel", 1)
    spec.save(found)


def _options(spec: PartSpec, num_tokens: int, num_prompts: int) -> Any:
    """Makes options of the capture benchmark for engines on so many GPUs each, and a target."""

    def options(tensor_parallel: int, shape: str) -> Namespace:
        values = {
            "--device": spec.device,
            "--shape": shape,
            "--prompt-tokens": num_tokens,
            "--num-prompts": num_prompts,
            "--repeats": 2 * REPEATS,
            "--tensor-parallel": tensor_parallel,
        }
        flags = ["--eager"] if spec.name == "mla" else ["--eager", "--dummy"]
        return parse([str(word) for pair in values.items() for word in pair] + flags)

    return options


def make_miniature(spec: PartSpec, folder: Path) -> Path:
    """Write the miniature whose heads all GPUs can share."""
    from eagle3_core.capture import miniature
    from eagle3_core.capture.miniature_config import miniature_config
    from eagle3_core.capture.probe_plan import known_architecture

    small = miniature_config(known_architecture("deepseek-v3"), spec.gpus)
    return miniature.make_miniature(small, folder / "miniature").folder


def measure_engines(spec: PartSpec, options: Namespace, folder: Path, count: int) -> dict[str, Any]:
    """Rounds of so many engines of each mode.

    Args:
        spec: of the part.
        options: of the capture benchmark; `shape` is the target's folder.
        folder: made here.
        count: engines of each mode, side by side.

    Returns:
        Tokens per second by mode and number of engines, and by which engine; what was stored.
    """
    files = [prepare(options, Path(options.shape), folder / f"engine-{index}") for index in range(count)]
    config = WorkerSpec.model_validate_json(files[0].read_text()).config
    environment = engine_environment(config.engine)
    variables = replica_variables(config, count, list(spec.devices))
    workers = {
        mode: [
            Worker(file, mode, environment | own, watch_memory=False)
            for file, own in zip(files, variables, strict=True)
        ]
        for mode in MODES
    }
    try:
        started = time.perf_counter()
        loaded = [ask_all(workers[mode], "load") for mode in MODES]
        seconds = time.perf_counter() - started
        tell(f"{folder.name}: {2 * count} engines loaded in {seconds:.0f} s")
        rounds = _rounds(workers, count)
    finally:
        close_all([worker for group in workers.values() for worker in group])
    return {
        "engine": loaded[0][0]["engine"],
        "device": loaded[0][0]["device"],
        "engines": count,
        "gpus_of_an_engine": options.tensor_parallel,
        "load_seconds": seconds,
        "tokens_per_second": summary(rounds),
        "rounds": rounds,
    }


def round_sizes(count: int) -> list[int]:
    """How many engines work in each round: all to warm up, then one and all of them in turn.

    >>> round_sizes(8)
    [8, 1, 8, 1, 8, 1, 8]
    """
    return [count, *([1, count] * REPEATS)] if count > 1 else [1] * (1 + REPEATS)


def _rounds(workers: dict[str, list[Worker]], count: int) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = []
    for number, size in enumerate(round_sizes(count)):
        for mode in MODES if number % 2 == 0 else tuple(reversed(MODES)):
            taken = _round(workers[mode][:size], number)
            if number:
                rounds.append({"mode": mode, "engines": size, **taken})
                tell(
                    f"round {number}: {mode}, {size} engines: "
                    f"{taken['tokens'] / taken['seconds']:,.0f} tokens/s, "
                    f"{taken['stored_bytes'] / taken['seconds'] / 1e9:.2f} GB/s stored"
                )
    return rounds


def _round(workers: Sequence[Worker], number: int) -> dict[str, Any]:
    """One round of some engines at once, from the first one's start to the last one's end."""
    answers = ask_all(workers, f"round {number}")
    ended = max(answer["began"] + answer["seconds"] for answer in answers)
    return {
        "seconds": ended - min(answer["began"] for answer in answers),
        "tokens": sum(answer["tokens"] for answer in answers),
        "stored_bytes": sum(answer["stored_bytes"] for answer in answers),
        "engine_seconds": [answer["seconds"] for answer in answers],
        "last_token_seconds": [answer["last_token_seconds"] for answer in answers],
    }


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median tokens per second by mode and number of engines, which is text as in JSON."""
    speeds: dict[str, dict[str, list[float]]] = {}
    for taken in rounds:
        of_mode = speeds.setdefault(taken["mode"], {})
        of_mode.setdefault(str(taken["engines"]), []).append(taken["tokens"] / taken["seconds"])
    return {mode: {n: statistics.median(each) for n, each in found.items()} for mode, found in speeds.items()}


if __name__ == "__main__":
    serve(measure)
