"""Measures optimizer steps of the same packs on one and on several ranks, and prints how they scale.

`python -m benchmarks.train_ranks` takes small shapes and gloo on the CPU; on a host with two GPUs:

    python -m benchmarks.train_ranks --shape llama-8b --device cuda --ttt-steps 7 --ranks 2 --packs 2 8

A step has `--packs` packs, equally large, shared by all ranks; one rank takes them one after the other. Ranks
are started once, by torchrun: the first works alone while the others wait, then all work. Loss and gradient
norm of the first step are printed too: they are the same for every number of ranks.

Three figures tell why several ranks fall short: how long sending weights and gradients takes on its own; how
much longer a step is than one in which nothing is sent (`ddp` only), which is less where it happens beside
the backward pass; and how long each rank takes for such a step of its own, since all wait for the slowest.
On shared cores no figure says anything but that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.rank_processes import is_rank, join_ranks, leave, run_ranks, settle
from benchmarks.train_sides import SHAPES, Step, make_draft, make_samples, ours
from eagle3_core.host.inspect import GIB
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
        num_packs: of a step.
    """

    def __init__(self, options: argparse.Namespace, ranks: Ranks, num_packs: int) -> None:
        shape, device = SHAPES[options.shape], options.device
        torch.manual_seed(0)
        draft = make_draft(shape, device)
        self.ranks, self.device = ranks, device
        self.weights: Weights = hold_weights(draft, ranks, options.parallel, torch.device(device))
        self.optimizer = torch.optim.AdamW(self.weights.parameters.values(), lr=1e-6, fused=True)
        self.forwards: list[Step] = []
        for number in share_packs([1.0] * num_packs, ranks.size)[ranks.rank]:
            torch.manual_seed(SEED + number)
            samples = make_samples(shape, options.loss_share)
            self.forwards.append(ours(draft, samples, options.ttt_steps, device)[0])
        self.tokens = num_packs * shape.documents * shape.document_tokens
        self.num_packs = num_packs

    def step(self, sends: bool = True) -> tuple[float, float]:
        """One step; returns the mean loss of all packs and the gradient norm.

        Args:
            sends: whether ranks share it; else each takes a step with its own packs.
        """
        loss = torch.zeros((), device=self.device)
        with self.weights.whole():
            for number, forward in enumerate(self.forwards, start=1):
                part = forward() / self.num_packs
                is_sent = sends and number == len(self.forwards)
                with self.weights.sending() if is_sent else contextlib.nullcontext():
                    part.backward()
                loss += part.detach()
                del part  # it keeps what its forward pass has left, which the next one needs room for
            if sends:
                self.weights.reduce()
        norm = self.weights.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (self.ranks.total([float(loss)])[0] if sends else float(loss)), norm

    def communication_seconds(self) -> float:
        """How long ranks take to send weights and gradients in a step, with nothing computed beside it."""
        spent = 0.0
        with contextlib.ExitStack() as stack:
            spent += self.seconds(lambda: stack.enter_context(self.weights.whole()))[0]
            for forward in self.forwards:
                forward().backward()
            spent += self.seconds(self.weights.reduce)[0]
        self.optimizer.zero_grad(set_to_none=True)
        return spent

    def seconds(self, act: Callable[[], object]) -> tuple[float, float]:
        """How long all ranks take for it together, and how long this one does."""
        settle(self.ranks)
        started = time.perf_counter()
        act()
        if self.device == "cuda":
            torch.cuda.synchronize()
        own = time.perf_counter() - started
        settle(self.ranks)
        return time.perf_counter() - started, own


def measure(options: argparse.Namespace, ranks: Ranks, num_packs: int) -> dict[str, Any]:
    """What these ranks find together.

    Args:
        options: of the command line.
        ranks: that share each step; one alone is measured too.
        num_packs: of a step.
    """
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    runner = Runner(options, ranks, num_packs)
    loss, norm = runner.step()
    for _ in range(options.warm_up):
        runner.step()
    spent, silent = [], []
    can_be_silent = ranks.size > 1 and options.parallel == "ddp"
    for _ in range(options.rounds):
        spent.append(runner.seconds(runner.step)[0])
        if can_be_silent:
            silent.append(runner.seconds(lambda: runner.step(sends=False)))
    found: dict[str, Any] = {
        "ranks": ranks.size,
        "packs": num_packs,
        "loss": loss,
        "norm": norm,
        "ms": 1000 * statistics.median(spent),
        "spread_ms": [1000 * min(spent), 1000 * max(spent)],
        "tokens_per_second": runner.tokens / statistics.median(spent),
    }
    if ranks.size > 1:
        sending = [runner.communication_seconds() for _ in range(COMMUNICATION_ROUNDS)]
        found["communication_ms"] = 1000 * statistics.median(sending)
    if silent:
        together, own = zip(*silent, strict=True)
        found["exposed_ms"] = found["ms"] - 1000 * statistics.median(together)
        found["own_ms"] = ranks.all(1000 * statistics.median(own))
    if options.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return found


def work(options: argparse.Namespace) -> None:
    """Be one rank; the first one leaves what was measured, the others wait while it works alone."""
    ranks = join_ranks(options.device)
    alone, found = Ranks(device=ranks.device), []
    for num_packs in options.packs or [ranks.size]:
        for taking_part in [alone, ranks][: ranks.size]:
            if ranks.is_first or taking_part is ranks:
                found.append(measure(options, taking_part, num_packs))
            gc.collect()
            ranks.wait()
    leave(found, ranks)


def report(found: list[dict[str, Any]]) -> None:
    """Print each number of packs, and several ranks beside one."""
    alone = {each["packs"]: each for each in found if each["ranks"] == 1}
    for each in found:
        sending = ""
        if "communication_ms" in each:
            sending = f", sending alone {each['communication_ms']:.1f}"
        if "exposed_ms" in each:
            own = "/".join(f"{ms:.1f}" for ms in each["own_ms"])
            sending += f", a step is longer by {each['exposed_ms']:.1f} than without, of its own {own}"
        memory = f", peak {each['peak_gib']:.1f} GiB a GPU" if "peak_gib" in each else ""
        print(
            f"{each['packs']} packs, {each['ranks']} ranks: {each['ms']:.1f} ms a step "
            f"({each['spread_ms'][0]:.1f}-{each['spread_ms'][1]:.1f}{sending}), "
            f"{each['tokens_per_second']:.0f} tokens/s, "
            f"{each['tokens_per_second'] / alone[each['packs']]['tokens_per_second']:.2f} x{memory}; "
            f"first step: loss {each['loss']:.6f}, gradient norm {each['norm']:.6f}"
        )


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="cpu-small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="beside one")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--packs", type=int, nargs="+", help="of one optimizer step; by default one a rank")
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--loss-share", type=float, default=0.5, help="of the tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures to a file")
    options = parser.parse_args()
    if is_rank():
        work(options)
        return
    found = run_ranks("benchmarks.train_ranks", options.ranks, sys.argv[1:])
    report(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
