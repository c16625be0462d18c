"""Compares our training step with that of speculators 0.9.0 on the same tensors, in turn, in one process.

`python benchmarks/train_step.py` takes small shapes on the CPU; `--shape llama-8b --device cuda` those of a
draft for an 8B target. It prints milliseconds, packed tokens per second and the ratio. On shared cores only
the ratio says something.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eagle3_core.store.shards import CapturedSample
from eagle3_core.training.loader import build_pack
from eagle3_core.training.loss import Teacher, pack_loss, step_weights
from eagle3_core.training.ttt import ttt_forward

NUM_AUX = 3
ROUNDS, WARM_UP = 5, 2


@dataclass(frozen=True)
class Shape:
    """Sizes of a comparison: a draft, and a pack of equal documents."""

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
}


def make_draft(shape: Shape, device: str) -> Any:
    """A random draft of speculators, on its fastest attention for the device."""
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
    )
    layer._attn_implementation = "simple_flex_attention" if device == "cuda" else "sdpa"
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
    draft = Eagle3DraftModel(config)
    with torch.no_grad():
        for weight in (draft.embed_tokens.weight, draft.lm_head.weight, draft.verifier_lm_head.weight):
            weight.normal_(0, 0.02)
    return draft.to(device)


def make_samples(shape: Shape, loss_share: float) -> list[CapturedSample]:
    """Random states; the last `loss_share` of each document carries loss."""
    samples = []
    for number in range(shape.documents):
        tokens = shape.document_tokens
        mask = torch.zeros(tokens, dtype=torch.uint8)
        mask[max(1, round(tokens * (1 - loss_share))) :] = 1
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


def ours(draft: Any, samples: list[CapturedSample], steps: int, device: str) -> Callable[[], torch.Tensor]:
    """Our forward; call the result for a loss."""
    pack = build_pack(samples, steps).to(torch.device(device))
    head = draft.verifier_lm_head.weight.detach().to(torch.bfloat16)
    teacher = Teacher(draft.verifier_norm.weight.detach(), draft.verifier_norm.variance_epsilon, head)
    weights = step_weights(pack.plan.counts, 1.0)

    def forward() -> torch.Tensor:
        hidden = ttt_forward(draft, pack, torch.bfloat16)
        return pack_loss(hidden, head, pack.final_states, teacher, pack.plan, weights).loss

    return forward


def theirs(draft: Any, samples: list[CapturedSample], steps: int, device: str) -> Callable[[], torch.Tensor]:
    """The forward of speculators under autocast; call the result for a loss."""
    from speculators.losses import resolve_loss_config

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
    batch = {name: tensor.unsqueeze(0).to(device) for name, tensor in tensors.items()}
    loss_config = resolve_loss_config("kl_div", "fused" if device == "cuda" else "eager")

    def forward() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return draft(**batch, ttt_steps=steps, loss_config=loss_config)[1]

    return forward


def timed(draft: Any, forward: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of one optimizer step: forward, backward, clipping, AdamW."""
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    times = []
    for _ in range(WARM_UP + ROUNDS):
        started = time.perf_counter()
        forward().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    """Print one line for each trainer and the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="cpu-small")
    parser.add_argument("--steps", type=int, default=3, help="TTT steps")
    parser.add_argument("--loss-share", type=float, default=0.5, help="share of tokens that carry loss")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    draft, samples = make_draft(shape, options.device), make_samples(shape, options.loss_share)
    seconds = {}
    for name, trainer in (("speculators", theirs), ("ours", ours)):
        seconds[name] = timed(draft, trainer(draft, samples, options.steps, options.device), options.device)
        speed = shape.documents * shape.document_tokens / seconds[name]
        print(f"{name:12s} {1000 * seconds[name]:10.1f} ms a step {speed:10.0f} tokens/s")
    print(
        f"ratio {seconds['speculators'] / seconds['ours']:.2f} "
        f"({options.shape}, {options.steps} steps, {options.loss_share:.0%} of tokens with loss)"
    )


if __name__ == "__main__":
    main()
