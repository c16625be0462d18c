"""The trainers that `train_quality` compares: speculators 0.9.0's forward and loss, and ours in three ways.

Legend: R rows of a pack, T TTT steps.

Each has its own copy of one first draft; the optimizer, clipping and the order of packs are shared code.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality_inputs import Inputs
from benchmarks.train_sides import speculators_loss
from eagle3_core.config import RunConfig
from eagle3_core.errors import TrainingError
from eagle3_core.training.draft import DTYPES, build_draft, initialise, teacher_of, trained_parameters
from eagle3_core.training.evaluate import Evaluation
from eagle3_core.training.loader import PackReader, plan_packs
from eagle3_core.training.loss import pack_loss, step_weights
from eagle3_core.training.optimizers import Optimizers
from eagle3_core.training.ttt import Pack, ttt_forward

SPECULATORS, OURS, HEAD, ACCEPTANCE = "speculators", "ours", "trained head", "acceptance loss"
TRAINERS = (SPECULATORS, OURS, HEAD, ACCEPTANCE)
PADDING = -1
"""Document of rows that speculators leaves out."""
FLEX_BLOCK = 128
"""Rows of a block of flex attention."""
PackLoss = Callable[[Pack], Tensor]


@dataclass
class Trial:
    """A draft in training.

    Attributes:
        name: of the trainer.
        draft: on its device.
        config: of the run, with this trainer's options.
        loss_of: the loss of a pack, a scalar with a gradient.
        losses: of the steps taken.
        seconds: spent in these steps.
        looks: step and what the held-out split then gave.
    """

    name: str
    draft: Any
    config: RunConfig
    loss_of: PackLoss
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    looks: list[tuple[int, Evaluation]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parameters = trained_parameters(self.draft)
        self._optimizers = Optimizers(self._parameters, self.config.train)

    def step(self, pack: Pack, rate: float) -> None:
        """One optimizer step.

        Raises:
            TrainingError: its loss or gradient is not finite.
        """
        started = time.perf_counter()
        loss = self.loss_of(pack)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self.config.train.max_grad_norm)
        found = float(loss.detach())
        if not math.isfinite(found) or not math.isfinite(float(norm)):
            raise TrainingError(
                f"step {len(self.losses) + 1} of {self.name} has loss {found:g} and gradient norm {norm:g}",
                expected="finite values",
                remedy="lower train.learning_rate",
            )
        self._optimizers.step(rate)
        self._optimizers.zero_grad()
        self.losses.append(found)
        self.seconds += time.perf_counter() - started

    def lengths(self) -> list[float]:
        """Acceptance length at each evaluation."""
        return [found.heldout.acceptance_length for _, found in self.looks]


def config_of(name: str, config: RunConfig) -> RunConfig:
    """The configuration of a trainer: KL and a frozen head, but for what its name says."""
    kind = "acceptance" if name == ACCEPTANCE else "kl"
    loss = config.train.loss.model_copy(update={"kind": kind})
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"loss": loss}),
            "draft": config.draft.model_copy(update={"train_lm_head": name == HEAD}),
        }
    )


def our_loss(draft: Any, config: RunConfig) -> PackLoss:
    """The loss as the training loop computes it."""
    teacher = teacher_of(draft, DTYPES[config.train.compute_dtype])
    head = draft.lm_head.weight if config.draft.train_lm_head else teacher.head

    def loss_of(pack: Pack) -> Tensor:
        hidden = ttt_forward(draft, pack, teacher.head.dtype)
        weights = step_weights(pack.plan.counts, config.train.step_loss_decay)
        return pack_loss(hidden, head, pack.final_states, teacher, pack.plan, weights, config.train.loss).loss

    return loss_of


def their_loss(draft: Any, config: RunConfig, num_rows: int | None) -> PackLoss:
    """The loss as speculators computes it, under autocast.

    Args:
        draft: an `Eagle3DraftModel`.
        config: of the run.
        num_rows: packs are padded to so many rows; None pads nothing.
    """
    device, dtype = draft.device.type, DTYPES[config.train.compute_dtype]
    is_mixed = dtype != torch.float32
    settings = {
        "ttt_steps": config.train.ttt_steps,
        "ttt_step_loss_decay": config.train.step_loss_decay,
        "loss_config": speculators_loss(device),
    }

    def loss_of(pack: Pack) -> Tensor:
        batch = speculators_batch(pack, num_rows)
        if not is_mixed:
            batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
        with torch.autocast(device, dtype=dtype, enabled=is_mixed):
            return draft(**batch, **settings)[1]

    return loss_of


def speculators_batch(pack: Pack, num_rows: int | None = None) -> dict[str, Tensor]:
    """A pack as speculators' forward takes it: [1, R, ...], padded to `num_rows` rows without loss."""
    device, rows = pack.input_ids.device, len(pack.input_ids)
    lengths = torch.tensor([end - start for start, end in pairwise(pack.plan.offsets)], device=device)
    labels = torch.from_numpy(pack.plan.labels).to(device)
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    mask[labels] = True
    final = pack.final_states.new_zeros(rows, pack.final_states.shape[1])
    final[labels] = pack.final_states
    tensors = {
        "hidden_states": pack.aux_states,
        "input_ids": pack.input_ids,
        "document_ids": torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths),
        "loss_mask": mask,
        "position_ids": pack.positions,
        "verifier_last_hidden_states": final,
    }
    missing = (num_rows or rows) - rows
    filled = {"document_ids": PADDING}
    return {
        name: torch.cat([x, x.new_full((missing, *x.shape[1:]), filled.get(name, 0))]).unsqueeze(0)
        for name, x in tensors.items()
    }


def start_draft(inputs: Inputs, reader: PackReader) -> Any:
    """The draft that all start from; the states of the first epoch's first pack scale it."""
    train = inputs.config.train
    draft = build_draft(config_of(OURS, inputs.config), inputs.target, inputs.vocabulary)
    lengths = [sample.num_tokens for sample in reader.samples]
    first = plan_packs(lengths, train.pack_tokens, train.seed, 0)[0]
    initialise(draft, reader.pack(first).aux_states, train.seed)
    return draft


def begin(name: str, start: Any, config: RunConfig, num_tokens: int) -> Trial:
    """A trainer with its own copy of the first draft, on the configuration's device.

    On a GPU speculators runs compiled, with flex attention; its packs are padded to one length, because each
    length would be compiled.

    Args:
        name: of `TRAINERS`.
        start: as `start_draft` made it.
        config: of the run.
        num_tokens: of the longest pack.
    """
    from speculators.models.eagle3 import Eagle3DraftModel

    own, device, made = config_of(name, config), config.engine.device, copy.deepcopy(start.config)
    attention = "simple_flex_attention" if device == "cuda" else "sdpa"
    made.transformer_layer_config._attn_implementation = attention
    draft = Eagle3DraftModel(made)
    draft.load_state_dict(start.state_dict())
    draft.lm_head.weight.requires_grad_(own.draft.train_lm_head)
    draft.to(device)
    if name != SPECULATORS:
        return Trial(name, draft, own, our_loss(draft, own))
    num_rows = -(-num_tokens // FLEX_BLOCK) * FLEX_BLOCK if device == "cuda" else None
    return Trial(name, draft, own, their_loss(draft, own, num_rows))
