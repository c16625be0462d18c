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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.train_floor import step_flops
from eagle3_core.store.shards import CapturedSample
from eagle3_core.training.loader import build_pack
from eagle3_core.training.loss import Teacher, pack_loss, step_weights
from eagle3_core.training.rows import RowPlan
from eagle3_core.training.ttt import ttt_forward

NUM_AUX = 3
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """Sizes of a comparison: a draft, and a pack of equal documents of `document_tokens` trained rows."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    target_vocab: int
    draft_vocab: int
    documents: int
    document_tokens: int


SHAPES = {
    "cpu-small": Shape(576, 1536, 9, 3, 64, 8192, 4096, 4, 256),
    "llama-8b": Shape(4096, 14336, 32, 8, 128, 128_256, 32_000, 4, 2048),
    "kimi-k2.5": Shape(7168, 18432, 64, 8, 128, 163_840, 163_840, 4, 1024),
}
Step = Callable[[], torch.Tensor]


def make_draft(shape: Shape, device: str, attention: str | None = None) -> Any:
    """A random draft of speculators, on its fastest attention for the device unless another is named."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        vocab_size=shape.target_vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=65536,
    )
    layer._attn_implementation = attention or ("simple_flex_attention" if device == "cuda" else "sdpa")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocab,
        eagle_aux_hidden_state_layer_ids=[2, 4, 6],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    with torch.device(device):
        draft = Eagle3DraftModel(config)
    with torch.no_grad():
        draft.embed_tokens.weight.normal_(0, 0.02)
        draft.verifier_lm_head.weight.normal_(0, 0.02)
        draft.lm_head.weight.copy_(draft.verifier_lm_head.weight)
    return draft.to(device)


def make_samples(shape: Shape, loss_share: float) -> list[CapturedSample]:
    """Random states; the last `loss_share` of each document carries loss.

    A document has one token more than rows, because a trainer reads states and the token after each: so a
    pack of both trainers has exactly `documents` x `document_tokens` rows, which flex attention asks for.
    """
    samples = []
    for number in range(shape.documents):
        tokens = shape.document_tokens + 1
        mask = torch.zeros(tokens, dtype=torch.uint8)
        mask[1 + round(shape.document_tokens * (1 - loss_share)) :] = 1
        rows = mask.nonzero().squeeze(-1)
        samples.append(
            CapturedSample(
                key=str(number),
                input_ids=torch.randint(0, shape.target_vocab, (tokens,), dtype=torch.int32),
                loss_mask=mask,
                aux_states=torch.randn(tokens, NUM_AUX, shape.hidden, dtype=torch.bfloat16),
                final_states=torch.randn(len(rows), shape.hidden, dtype=torch.bfloat16),
                final_rows=rows,
            )
        )
    return samples


def ours(draft: Any, samples: list[CapturedSample], steps: int, device: str) -> tuple[Step, RowPlan]:
    """Our forward: call the first result for a loss."""
    pack = build_pack(samples, steps).to(torch.device(device))
    head = draft.verifier_lm_head.weight.detach().to(torch.bfloat16)
    teacher = Teacher(draft.verifier_norm.weight.detach(), draft.verifier_norm.variance_epsilon, head)
    weights = step_weights(pack.plan.counts, 1.0)

    def forward() -> torch.Tensor:
        hidden = ttt_forward(draft, pack, torch.bfloat16)
        return pack_loss(hidden, head, pack.final_states, teacher, pack.plan, weights).loss

    return forward, pack.plan


def theirs(
    draft: Any,
    samples: list[CapturedSample],
    steps: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
) -> Step:
    """The forward of speculators, in bf16 by autocast or in fp32; call the result for a loss."""
    final = []
    for sample in samples:
        states = torch.zeros(len(sample.input_ids), sample.final_states.shape[1], dtype=torch.bfloat16)
        states[sample.final_rows] = sample.final_states
        final.append(states[1:])
    lengths = [len(sample.input_ids) - 1 for sample in samples]
    tensors = {
        "hidden_states": torch.cat([sample.aux_states[:-1].flatten(1) for sample in samples]),
        "input_ids": torch.cat([sample.input_ids[1:] for sample in samples]).long(),
        "document_ids": torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)),
        "loss_mask": torch.cat([sample.loss_mask[1:] for sample in samples]).bool(),
        "position_ids": torch.cat([torch.arange(1, length + 1) for length in lengths]),
        "verifier_last_hidden_states": torch.cat(final),
    }
    batch = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).unsqueeze(0).to(device)
        for name, tensor in tensors.items()
    }
    loss_config = speculators_loss(device, fused=dtype != torch.float32)

    def forward() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype != torch.float32):
            return draft(**batch, ttt_steps=steps, loss_config=loss_config)[1]

    return forward


def speculators_loss(device: str, fused: bool = True) -> dict[str, Any]:
    """The KL of speculators, fused where it can and shall be and then kept out of the compiled graph."""
    from speculators.losses import resolve_loss_config

    if device != "cuda" or not fused:
        return resolve_loss_config("kl_div", "eager")
    losses = resolve_loss_config("kl_div", "fused")
    return {name: (torch._dynamo.disable(function), weight) for name, (function, weight) in losses.items()}


class Runner:
    """Optimizer steps of either trainer on one draft."""

    def __init__(self, draft: Any, device: str) -> None:
        self.parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, fused=True)
        self.device = device

    def step(self, forward: Step) -> list[float]:
        """Milliseconds of forward with loss, of backward, and of clipping with AdamW."""
        marks = [self._mark()]
        loss = forward()
        marks.append(self._mark())
        loss.backward()
        marks.append(self._mark())
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        marks.append(self._mark())
        if self.device == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in pairwise(marks)]
        return [1000 * (b - a) for a, b in pairwise(marks)]

    def _mark(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def gradients(self, forward: Step) -> tuple[float, list[torch.Tensor]]:
        """A loss and the gradients, without a step."""
        loss = forward()
        loss.backward()
        found = [parameter.grad.detach().clone() for parameter in self.parameters]
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), found


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
        from benchmarks.train_parity import exactness, say

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
