"""The forward and backward passes of one optimizer step, and what all ranks found in them together.

Legend: K TTT steps, M_k loss rows of step k in a pack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3_core.config import RunConfig
from eagle3_core.training.agreement import Agreement
from eagle3_core.training.draft import DTYPES, target_ids_of, teacher_of
from eagle3_core.training.loss import LossParts, pack_loss, step_weights
from eagle3_core.training.noise import with_noise
from eagle3_core.training.ranks import Ranks
from eagle3_core.training.rows import RowPlan
from eagle3_core.training.steps import StepPlan
from eagle3_core.training.ttt import Pack, ttt_forward
from eagle3_core.training.weights import Weights

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel


@dataclass(frozen=True)
class StepValues:
    """What one optimizer step computed on all ranks, before it is taken.

    Attributes:
        sums: S_k of each TTT step.
        loss: of the step.
        norm: of its gradient before clipping.
    """

    sums: list[float]
    loss: float
    norm: float


@dataclass(frozen=True)
class StepChoices:
    """What the draft of all ranks chose in a step.

    Attributes:
        agreement: of the draft's choices with the target's own.
        share: mean probability that the target gives to the draft vocabulary at its labels.
    """

    agreement: Agreement
    share: float


@dataclass(frozen=True)
class _Chosen:
    """Choices of a pack, [sum of M_k] target ids on their way to the CPU, and what they are held against."""

    plan: RowPlan
    targets: Tensor
    argmax: Tensor
    share: Tensor


class StepComputer:
    """Computes optimizer steps; their gradients lie in `weights.parameters` afterwards, clipped.

    Args:
        draft: in fp32.
        weights: of the draft.
        config: of the run.
        ranks: that share each step.

    Attributes:
        device: that this rank computes on.
        teacher: the target's norm and head rows, in the compute dtype.
    """

    def __init__(self, draft: Eagle3DraftModel, weights: Weights, config: RunConfig, ranks: Ranks) -> None:
        self._draft, self._weights, self._config, self._ranks = draft, weights, config, ranks
        self.device = draft.verifier_norm.weight.device
        self.teacher = teacher_of(draft, DTYPES[config.train.compute_dtype])
        self._target_ids = target_ids_of(draft)
        self._chosen: list[_Chosen] = []

    def compute(self, plan: StepPlan, packs: Iterable[Pack], epoch: int) -> StepValues:
        """Forward and backward passes of this rank's packs, and what all ranks found.

        It returns when the device has done its work.

        Args:
            plan: of the step.
            packs: this rank's of it, with labels; not asked for more, which would wait for the next step's.
            epoch: from 0; noise differs by it.
        """
        train = self._config.train
        weights = step_weights(plan.counts, train.step_loss_decay)
        sums = torch.zeros(len(weights), dtype=torch.float64, device=self.device)
        self._chosen = []
        with self._weights.whole():
            for number, pack in enumerate(islice(packs, len(plan.mine)), start=1):
                sums += self._learn(pack, weights, epoch, is_last=number == len(plan.mine))
            self._weights.reduce()
        norm = self._weights.clip(train.max_grad_norm)  # one rank's for all: they must judge a step alike
        norm, *totals = self._ranks.total([norm if self._ranks.is_first else 0.0, *sums.tolist()])
        loss = sum(weight * total for weight, total in zip(weights, totals, strict=True))
        return StepValues(totals, loss, norm)

    def choices(self) -> StepChoices:
        """What was chosen in the step computed last; best asked while the device takes the step."""
        agreement = Agreement(self._config.train.ttt_steps)
        for each in self._chosen:
            agreement.add(each.plan, each.targets.split(each.plan.counts), each.argmax)
        share = sum(float(each.share.sum(dtype=torch.float64)) for each in self._chosen)
        num_labels = float(sum(len(each.share) for each in self._chosen))
        share, num_labels, *counts = self._ranks.total(
            [share, num_labels, *agreement.counts.ravel().tolist()]
        )
        return StepChoices(Agreement.of(counts), share / max(1, num_labels))

    def _learn(self, pack: Pack, weights: Sequence[float], epoch: int, is_last: bool) -> Tensor:
        """Forward and backward passes of a pack; returns its S_k.

        The loss ends with this call: it keeps all that the forward pass has left, after the backward pass
        too, and the next pack needs that memory.
        """
        noisy = with_noise(pack.to(self.device), self._config.train, self._draft.hidden_size, epoch)
        parts = self._losses(noisy, weights)
        with self._weights.sending() if is_last else contextlib.nullcontext():
            parts.loss.backward()
        self._chosen.append(self._choices_of(pack, parts))
        return parts.step_sums

    def _choices_of(self, pack: Pack, parts: LossParts) -> _Chosen:
        """Asked when the gradients are under way: the copy does not hold them up."""
        assert pack.argmax is not None
        assert pack.share is not None
        targets = self._target_ids[torch.cat(parts.choices)].to("cpu", non_blocking=True)
        return _Chosen(pack.plan, targets, pack.argmax, pack.share)

    def _losses(self, pack: Pack, weights: Sequence[float]) -> LossParts:
        hidden = ttt_forward(self._draft, pack, self.teacher.head.dtype)
        head = self._draft.lm_head.weight if self._config.draft.train_lm_head else self.teacher.head
        kind = self._config.train.loss
        return pack_loss(hidden, head, pack.final_states, self.teacher, pack.plan, weights, kind)
