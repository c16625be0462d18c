"""Compares our training step with that of speculators 0.9.0 on the same tensors, in turn, in one process.

`python -m benchmarks.train_step` takes small shapes on the CPU; `--shape llama-8b --device cuda` those of a
draft for an 8B target. Both trainers share one draft and one optimizer, so that memory and work beside their
own step are the same. Rounds are interleaved; the ratio is the median of the rounds' ratios. On shared cores
only the ratio says something.

Speculators runs at its best: flex attention, compiled, with its fused loss kept out of the compiled graph
(torch 2.11 does not compile it). Both are first held against the same step in fp32, on a small pack
(`train_parity.py`); the script fails where ours is farther from it than speculators.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_floor import step_flops
from benchmarks.train_parity import exactness, say
from benchmarks.train_sides import SHAPES, Runner, Shape, Step, make_draft, make_samples, ours, theirs
from eagle3_core.host.inspect import GIB


def compare(runner: Runner, names: Sequence[str], mine: Step, other: Step) -> dict[str, Any]:
    """Relative distances of loss and gradients of two forwards on a pack where parity is defined."""
    loss, gradients = runner.gradients(mine)
    expected, wanted = runner.gradients(other)
    distances = {
        name: float((a - b).norm() / b.norm()) for name, a, b in zip(names, gradients, wanted, strict=True)
    }
    worst = max(distances, key=lambda name: distances[name])
    print(
        f"whole pack: loss {loss:.5f}, speculators {expected:.5f}, apart by {abs(loss / expected - 1):.2e}; "
        f"gradients apart by at most {distances[worst]:.2e} ({worst})"
    )
    return {"ours": loss, "speculators": expected, "gradients": distances}


def measure(runner: Runner, trainers: dict[str, Step], rounds: int, warm_up: int) -> dict[str, Any]:
    """Rounds of one step each trainer in turn; milliseconds of its parts, and its peak memory."""
    found: dict[str, Any] = {}
    for name, forward in trainers.items():
        started = time.perf_counter()
        for _ in range(warm_up):
            runner.step(forward)
        found[name] = {"warm_up_seconds": time.perf_counter() - started, "parts": []}
        if runner.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            runner.step(forward)
            found[name]["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    for _ in range(rounds):
        for name, forward in trainers.items():
            found[name]["parts"].append(runner.step(forward))
    return found


def report(found: dict[str, Any], tokens: int, flops: float, title: str) -> dict[str, Any]:
    """Print a comparison; returns it with medians and ratio."""
    totals = {name: [sum(parts) for parts in each["parts"]] for name, each in found.items()}
    print(title)
    for name, each in found.items():
        each["ms"] = statistics.median(totals[name])
        each["tokens_per_second"] = 1000 * tokens / each["ms"]
        forward, backward, rest = (statistics.median(part) for part in zip(*each["parts"], strict=True))
        memory = f" peak {each['peak_gib']:6.1f} GiB" if "peak_gib" in each else ""
        print(
            f"  {name:12s} {each['ms']:9.1f} ms a step {each['tokens_per_second']:9.0f} tokens/s{memory}   "
            f"forward {forward:.1f} backward {backward:.1f} optimizer {rest:.1f} ms, "
            f"warm-up {each['warm_up_seconds']:.0f} s, spread {min(totals[name]):.1f}-{max(totals[name]):.1f}"
        )
    if "ours" in found:
        print(f"  ours does {flops / 1e12:.1f} TFLOP, {flops / found['ours']['ms'] / 1e9:.0f} TFLOP/s")
    result: dict[str, Any] = {"title": title, "trainers": found, "flops": flops}
    if len(found) == 2:
        pairs = zip(totals["speculators"], totals["ours"], strict=True)
        result["ratio"] = statistics.median(a / b for a, b in pairs)
        print(f"  ratio {result['ratio']:.2f}")
    return result


def profile(runner: Runner, forward: Step, rows: int) -> None:
    """Print the kernels of one step by time, and matrix products by shape."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    if runner.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as trace:
        runner.step(forward)
    device = runner.device == "cuda"
    totals: dict[str, list[float]] = {}
    for event in trace.events():
        if not device or event.device_type.name == "CUDA":
            entry = totals.setdefault(event.name, [0.0, 0])
            entry[0] += event.self_device_time_total if device else event.self_cpu_time_total
            entry[1] += 1
    whole = sum(entry[0] for entry in totals.values())
    print(f"kernels of one step: {whole / 1000:.1f} ms in {sum(int(e[1]) for e in totals.values())} launches")
    for name, (spent, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:rows]:
        print(f"  {spent / 1000:8.2f} ms {100 * spent / whole:5.1f} % {count:5d} x {name[:120]}")
    if device:
        print("operators by shape:")
        averages = trace.key_averages(group_by_input_shape=True)
        for each in sorted(averages, key=lambda each: -each.self_device_time_total)[:rows]:
            print(
                f"  {each.self_device_time_total / 1000:8.2f} ms {each.count:4d} x {each.key[:60]} "
                f"{str(each.input_shapes)[:110]}"
            )


def long_document(shape: Shape, tokens: int, steps: int, device: str) -> dict[str, Any]:
    """Optimizer steps of ours on one long document, of which half carries loss."""
    one = Shape(**{**asdict(shape), "documents": 1, "document_tokens": tokens})
    draft = make_draft(one, device)
    forward, plan = ours(draft, make_samples(one, 0.5), steps, device)
    found = measure(Runner(draft, device), {"ours": forward}, 3, 1)
    flops = sum(step_flops(one, plan).values())
    return report(found, tokens, flops, f"one document of {tokens:,} tokens, {steps} steps, half with loss")


def main() -> None:
    """Print a comparison for each number of steps and share of loss."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="cpu-small")
    parser.add_argument("--steps", type=int, nargs="+", default=[3], help="TTT steps")
    parser.add_argument("--loss-share", type=float, nargs="+", default=[0.5], help="of the tokens")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--only", choices=("ours", "speculators"), help="run one trainer")
    parser.add_argument("--profile", type=int, nargs="?", const=40, help="kernels of our step to list")
    parser.add_argument("--long-document", type=int, metavar="TOKENS", help="also train on one document")
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape, device = SHAPES[options.shape], options.device
    results: list[dict[str, Any]] = []
    if options.only is None:
        results.append(exactness(shape, max(options.steps), device))
        print(say(results[0]))
    draft = make_draft(shape, device)
    runner = Runner(draft, device)
    names = [name for name, parameter in draft.named_parameters() if parameter.requires_grad]
    tokens = shape.documents * shape.document_tokens
    for steps in options.steps:
        for share in options.loss_share:
            samples = make_samples(shape, share)
            forward, plan = ours(draft, samples, steps, device)
            trainers = {"speculators": theirs(draft, samples, steps, device), "ours": forward}
            if options.only is None and share < 1:
                results.append(compare(runner, names, trainers["ours"], trainers["speculators"]))
            if options.only is not None:
                trainers = {options.only: trainers[options.only]}
            found = measure(runner, trainers, options.rounds, options.warm_up)
            flops = sum(step_flops(shape, plan).values())
            title = f"{options.shape}, {steps} steps, {share:.0%} of tokens with loss, {device}"
            results.append(report(found, tokens, flops, title))
            if options.profile:
                profile(runner, forward, options.profile)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    if options.long_document:
        del draft, runner, trainers, forward
        gc.collect()
        results.append(long_document(shape, options.long_document, max(options.steps), device))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if not all(result.get("equal", True) for result in results):
        raise SystemExit("our step is farther from fp32 than that of speculators")


if __name__ == "__main__":
    main()
