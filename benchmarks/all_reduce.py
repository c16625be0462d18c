"""Measures sums over all ranks, as training sends gradients: `python -m benchmarks.all_reduce --ranks 2`.

Bus bandwidth counts what each rank has to send and receive at least, 2 (n - 1) / n of the bytes that are
summed, and so compares with a link's bandwidth whatever the number of ranks. Times are medians over rounds,
each of several sums one after the other, from a moment when all ranks were ready until all had the last one.
NCCL on GPUs, gloo on the CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rank_processes import is_rank, join_ranks, leave, run_ranks, settle

MIB = 1 << 20
SIZES = {"cpu": (1, 4), "cuda": (1, 16, 64, 256, 1024)}
"""MiB of fp32 gradients, by device."""
SUMS = 5
"""Of a round."""


def bus_bandwidth(num_bytes: int, seconds: float, count: int) -> float:
    """Bytes per second that each rank's link carries at least, one way."""
    return 2 * (count - 1) / count * num_bytes / seconds


def work(options: argparse.Namespace) -> None:
    """Be one rank.

    Raises:
        RuntimeError: a sum is wrong.
    """
    import torch
    import torch.distributed as dist

    ranks = join_ranks(options.device)

    found: list[dict[str, Any]] = []
    for size in options.sizes or SIZES[options.device]:
        tensor = torch.full((size * MIB // 4,), float(ranks.rank + 1), device=options.device)
        dist.all_reduce(tensor)
        wanted = ranks.size * (ranks.size + 1) / 2
        if not bool((tensor == wanted).all()):
            raise RuntimeError(f"the sum of {size} MiB on rank {ranks.rank} is wrong")
        tensor.zero_()
        spent = []
        for number in range(options.warm_up + options.rounds):
            settle(ranks)
            started = time.perf_counter()
            for _ in range(SUMS):
                dist.all_reduce(tensor)
            settle(ranks)
            if number >= options.warm_up:
                spent.append((time.perf_counter() - started) / SUMS)
        seconds = statistics.median(spent)
        bandwidth = bus_bandwidth(size * MIB, seconds, ranks.size)
        found.append({"bytes": size * MIB, "seconds": seconds, "bus_bytes_per_second": bandwidth})
    leave(found, ranks)


def measure(count: int, device: str, sizes: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Time, and bus bandwidth in bytes per second, of each size on so many ranks.

    Raises:
        CalledProcessError: a rank failed.
    """
    arguments = ["--device", device, *(["--sizes", *map(str, sizes)] if sizes else [])]
    return run_ranks("benchmarks.all_reduce", count, arguments)


def main() -> None:
    """Print a line for each size, or be one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MIB", help=f"by default {SIZES}")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    options = parser.parse_args()
    if is_rank():
        work(options)
        return
    found = run_ranks("benchmarks.all_reduce", options.ranks, sys.argv[1:])
    for each in found:
        print(
            f"{each['bytes'] // MIB:6d} MiB {1000 * each['seconds']:9.3f} ms   bus "
            f"{each['bus_bytes_per_second'] / 1e9:8.2f} GB/s"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
