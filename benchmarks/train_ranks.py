"""Measures optimizer steps of the same packs on one and on several ranks, and prints how they scale.

`python -m benchmarks.train_ranks` takes small shapes and gloo on the CPU; on a host with two GPUs:

    python -m benchmarks.train_ranks --shape llama-8b --device cuda --ttt-steps 7 --ranks 1 2

A step has `--packs` packs, equally large for every number of ranks, so one rank takes them one after the
other. The first step's loss and gradient norm are printed too: they are the same for every number of ranks.
What is sent in a step (weights, gradients) is timed on its own, with all ranks ready before it. Ranks are
started by torchrun. On shared cores no figure says anything but that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.rank_processes import is_rank, join_ranks, leave, run_ranks
from benchmarks.train_sides import SHAPES, Step, make_draft, make_samples, ours
from benchmarks.train_step import GIB
from eagle3_core.training.ranks import Ranks
from eagle3_core.training.sharing import share_packs
from eagle3_core.training.weights import Weights, hold_weights

SEED = 1000
COMMUNICATION_ROUNDS = 3


class Runner:
    """Optimizer steps of one rank.

    Args:
        options: of the command line.
        ranks: that share each step.
    """

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        shape, device = SHAPES[options.shape], options.device
        torch.manual_seed(0)
        draft = make_draft(shape, device)
        self.ranks, self.device = ranks, device
        self.weights: Weights = hold_weights(draft, ranks, options.parallel, torch.device(device))
        self.optimizer = torch.optim.AdamW(self.weights.parameters.values(), lr=1e-6, fused=True)
        self.forwards: list[Step] = []
        for number in share_packs([1.0] * options.packs, ranks.size)[ranks.rank]:
            torch.manual_seed(SEED + number)
            samples = make_samples(shape, options.loss_share)
            self.forwards.append(ours(draft, samples, options.ttt_steps, device)[0])
        self.tokens = options.packs * shape.documents * shape.document_tokens
        self.num_packs = options.packs

    def step(self) -> tuple[float, float]:
        """One step; returns the mean loss of all packs and the gradient norm."""
        loss = torch.zeros((), device=self.device)
        with self.weights.whole():
            for forward in self.forwards:
                part = forward() / self.num_packs
                part.backward()
                loss += part.detach()
            self.weights.reduce()
        norm = self.weights.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self.ranks.total([float(loss)])[0], norm

    def communication_seconds(self) -> float:
        """How long ranks take to send weights and gradients in a step, with nothing computed beside it."""
        spent = 0.0
        with contextlib.ExitStack() as stack:
            spent += self.seconds(lambda: stack.enter_context(self.weights.whole()))
            for forward in self.forwards:
                forward().backward()
            spent += self.seconds(self.weights.reduce)
        self.optimizer.zero_grad(set_to_none=True)
        return spent

    def seconds(self, act: Callable[[], object]) -> float:
        """How long all ranks take for it together."""
        self._settle()
        started = time.perf_counter()
        act()
        self._settle()
        return time.perf_counter() - started

    def _settle(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ranks.wait()


def work(options: argparse.Namespace) -> None:
    """Be one rank; the first one leaves what was measured."""
    ranks = join_ranks(options.device)
    runner = Runner(options, ranks)
    loss, norm = runner.step()
    for _ in range(options.warm_up):
        runner.step()
    spent = [runner.seconds(runner.step) for _ in range(options.rounds)]
    sending = [runner.communication_seconds() for _ in range(COMMUNICATION_ROUNDS)]
    found: dict[str, Any] = {
        "ranks": ranks.size,
        "loss": loss,
        "norm": norm,
        "ms": 1000 * statistics.median(spent),
        "spread_ms": [1000 * min(spent), 1000 * max(spent)],
        "communication_ms": 1000 * statistics.median(sending) if ranks.size > 1 else 0.0,
        "tokens_per_second": runner.tokens / statistics.median(spent),
    }
    if options.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    leave(found, ranks)


def report(found: list[dict[str, Any]]) -> None:
    """Print each number of ranks beside the first."""
    for each in found:
        ratio = each["tokens_per_second"] / found[0]["tokens_per_second"]
        sending = f", {each['communication_ms']:.1f} of them sending" if each["ranks"] > 1 else ""
        memory = f", peak {each['peak_gib']:.1f} GiB a GPU" if "peak_gib" in each else ""
        print(
            f"{each['ranks']} ranks: {each['ms']:.1f} ms a step ({each['spread_ms'][0]:.1f}-"
            f"{each['spread_ms'][1]:.1f}{sending}), {each['tokens_per_second']:.0f} tokens/s, {ratio:.2f} x"
            f"{memory}; first step: loss {each['loss']:.6f}, gradient norm {each['norm']:.6f}"
        )


def main() -> None:
    """Measure every number of ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="cpu-small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--packs", type=int, default=2, help="of one optimizer step")
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--loss-share", type=float, default=0.5, help="of the tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    options = parser.parse_args()
    if is_rank():
        work(options)
        return
    found = [run_ranks("benchmarks.train_ranks", count, sys.argv[1:]) for count in options.ranks]
    report(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
