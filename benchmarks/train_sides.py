"""The two trainers that are compared: one draft and one optimizer, our forward and that of speculators."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from eagle3_core.store.shards import CapturedSample
from eagle3_core.training.loader import build_pack
from eagle3_core.training.loss import Teacher, pack_loss, step_weights
from eagle3_core.training.rows import RowPlan
from eagle3_core.training.ttt import ttt_forward

NUM_AUX = 3


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
