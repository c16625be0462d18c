"""The forward and backward passes of one optimizer step, and what all ranks found in them together.

Legend: K TTT steps, M_k loss rows of step k in a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
        agreement: of the draft's choices with the target's own.
        share: mean probability that the target gives to the draft vocabulary at its labels.
    """

    sums: list[float]
    loss: float
    norm: float
    agreement: Agreement
    share: float


@dataclass(frozen=True)
class _Labelled:
    """What is counted of a pack once its gradients are under way: copies of choices would wait for them."""

    plan: RowPlan
    choices: tuple[Tensor, ...]
    argmax: Tensor
    share: Tensor

    @classmethod
    def of(cls, pack: Pack, parts: LossParts) -> _Labelled:
        assert pack.argmax is not None
        assert pack.share is not None
        return cls(pack.plan, parts.choices, pack.argmax, pack.share)


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

    def compute(self, plan: StepPlan, packs: Iterable[Pack], epoch: int) -> StepValues:
        """Forward and backward passes of this rank's packs, and what all ranks found.

        Args:
            plan: of the step.
            packs: this rank's of it, with labels.
            epoch: from 0; noise differs by it.
        """
        train = self._config.train
        weights = step_weights(plan.counts, train.step_loss_decay)
        sums = torch.zeros(len(weights), dtype=torch.float64, device=self.device)
        labelled: list[_Labelled] = []
        with self._weights.whole():
            for pack in packs:
                noisy = with_noise(pack.to(self.device), train, self._draft.hidden_size, epoch)
                parts = self._losses(noisy, weights)
                parts.loss.backward()
                sums += parts.step_sums
                labelled.append(_Labelled.of(pack, parts))
            self._weights.reduce()
        own_norm = self._weights.clip(train.max_grad_norm)
        return self._of_all_ranks(sums, own_norm, weights, labelled)

    def _losses(self, pack: Pack, weights: Sequence[float]) -> LossParts:
        hidden = ttt_forward(self._draft, pack, self.teacher.head.dtype)
        head = self._draft.lm_head.weight if self._config.draft.train_lm_head else self.teacher.head
        kind = self._config.train.loss
        return pack_loss(hidden, head, pack.final_states, self.teacher, pack.plan, weights, kind)

    def _of_all_ranks(
        self, sums: Tensor, own_norm: float, weights: Sequence[float], labelled: Sequence[_Labelled]
    ) -> StepValues:
        """Sums over all ranks. The norm is one rank's for all: they must judge the step alike."""
        agreement = Agreement(len(weights))
        for each in labelled:
            targets = self._target_ids[torch.cat(each.choices)].cpu().split(each.plan.counts)
            agreement.add(each.plan, targets, each.argmax)
        share = sum(float(each.share.sum(dtype=torch.float64)) for each in labelled)
        num_labels = float(sum(len(each.share) for each in labelled))
        norm = own_norm if self._ranks.is_first else 0.0
        own = [norm, share, num_labels, *sums.tolist(), *agreement.counts.ravel().tolist()]
        norm, share, num_labels, *rest = self._ranks.total(own)
        totals = rest[: len(weights)]
        loss = sum(weight * total for weight, total in zip(weights, totals, strict=True))
        agreement = Agreement.of(rest[len(weights) :])
        return StepValues(totals, loss, norm, agreement, share / max(1, num_labels))
