"""Held-out loss and acceptance of a draft.

Legend: R rows of a pack, n labels, M_k loss rows of step k, K steps unrolled.

One unrolled forward a pack gives all three: the loss of the trained steps, the draft's agreement with the
target's argmax over its FULL vocabulary (a token outside the draft vocabulary is a miss), and the replay of
greedy decoding on the stored answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eagle3_core.config import RunConfig
from eagle3_core.contracts import AcceptanceFigures
from eagle3_core.errors import TrainingError
from eagle3_core.serving.acceptance import TargetPass
from eagle3_core.training.agreement import Agreement, StepRates
from eagle3_core.training.ahead import ReadAhead
from eagle3_core.training.health import name_samples
from eagle3_core.training.loader import PackReader, plan_in_order
from eagle3_core.training.loss import LossParts, Teacher, pack_loss, step_weights
from eagle3_core.training.ranks import Ranks
from eagle3_core.training.replay import replay_figures, replay_passes
from eagle3_core.training.sharing import share_packs
from eagle3_core.training.ttt import Pack, ttt_forward

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel


@dataclass(frozen=True)
class Evaluation:
    """What one look at the held-out split found; `loss_by_step` is S_k / n_k of all steps unrolled."""

    loss: float
    loss_by_step: list[float]
    heldout: AcceptanceFigures
    benchmark: AcceptanceFigures
    rates: StepRates


@dataclass(frozen=True)
class _Answer:
    """A stored answer and whether the draft would guess its tokens; see `replay_passes`."""

    correct: np.ndarray
    prompt_length: int
    num_tokens: int

    def passes(self, limit: int | None = None) -> list[TargetPass]:
        tokens = self.num_tokens if limit is None else min(limit, self.num_tokens)
        return replay_passes(self.correct, self.prompt_length, tokens)


class HeldoutEvaluator:
    """Evaluates a draft on the held-out split.

    Ranks share the packs, and all get the same evaluation.

    Args:
        reader: packs of the held-out split with labels, planned for `steps_to_unroll(config)` steps.
        config: of the run.
        benchmark_keys: samples that the benchmark decodes.
        ranks: that share the packs.
    """

    def __init__(
        self,
        reader: PackReader,
        config: RunConfig,
        benchmark_keys: Sequence[str],
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        lengths = [sample.num_tokens for sample in reader.samples]
        packs = plan_in_order(lengths, config.train.pack_tokens)
        sizes = [sum(lengths[index] for index in members) for members in packs]
        mine = share_packs(sizes, self._ranks.size)[self._ranks.rank]
        self._plan = [packs[number] for number in mine]
        self._reader, self._config = reader, config
        self._benchmark_keys = tuple(benchmark_keys)

    def evaluate(
        self,
        draft: Eagle3DraftModel,
        teacher: Teacher,
        target_ids: Tensor,
        tell: Callable[[str], None] | None = None,
    ) -> Evaluation:
        """Loss, agreement and replayed acceptance.

        Args:
            draft: evaluated as it is, without gradients.
            teacher: the target's norm and head over the draft vocabulary, in the compute dtype.
            target_ids: [D], the target id of each draft id, on the draft's device.
            tell: told after each pack how far this rank is.

        Raises:
            TrainingError: the loss is not finite; names the samples.
        """
        own = _Tally(self._reader.num_steps)
        head = draft.lm_head.weight.detach().to(teacher.head.dtype)
        for number, (members, read) in enumerate(zip(self._plan, self._packs(), strict=True), start=1):
            pack = read.to(teacher.head.device)
            with torch.no_grad():
                hidden = ttt_forward(draft, pack, teacher.head.dtype)
                weights = [1.0] * len(hidden)
                kind = self._config.train.loss
                parts = pack_loss(hidden, head, pack.final_states, teacher, pack.plan, weights, kind)
                choices = [target_ids[ids].cpu() for ids in parts.choices]
            assert pack.argmax is not None
            own.add(parts, self._answers(pack, choices, members), pack.keys)
            own.agreement.add(pack.plan, choices, pack.argmax)
            if tell is not None:
                tell(f"held-out pack {number} of {len(self._plan)}")
        return self._evaluation(self._of_all_ranks(own))

    def _evaluation(self, found: _Tally) -> Evaluation:
        found.require_finite()
        train, benchmark = self._config.train, self._config.benchmark
        # In the order of samples, whoever evaluated them.
        whole = [found.answers[sample.key].passes() for sample in self._reader.samples]
        chosen = [found.answers[key].passes(benchmark.max_tokens) for key in self._benchmark_keys]
        return Evaluation(
            loss=found.loss(train.ttt_steps, train.step_loss_decay),
            loss_by_step=found.loss_by_step(),
            heldout=replay_figures(whole, benchmark.num_speculative_tokens),
            benchmark=replay_figures(chosen, benchmark.num_speculative_tokens),
            rates=found.agreement.rates(),
        )

    def _of_all_ranks(self, own: _Tally) -> _Tally:
        whole = _Tally(self._reader.num_steps)
        for each in self._ranks.all(own):
            whole.join(each)
        return whole

    def _packs(self) -> Iterator[Pack]:
        with ReadAhead(self._reader.packs(self._plan)) as packs:
            yield from packs

    def _answers(self, pack: Pack, choices: Sequence[Tensor], members: Sequence[int]) -> dict[str, _Answer]:
        """Each sample's last answer with the draft's choices compared with its tokens."""
        depth = self._config.benchmark.num_speculative_tokens
        correct = np.zeros((depth, len(pack.input_ids)), bool)
        offsets, followers = np.array(pack.plan.offsets), pack.input_ids.cpu().numpy()
        for step in range(depth):
            plan = pack.plan.steps[step]
            rows = plan.rows[plan.loss]
            ends = offsets[np.searchsorted(offsets, rows, side="right")]
            following = rows + step + 1  # row t + k + 1 reads token x[t + 2 + k]
            inside = following < ends
            wanted = followers[np.where(inside, following, 0)]
            correct[step, rows] = inside & (choices[step].numpy() == wanted)
        found = {}
        for place, index in enumerate(members):
            sample = self._reader.samples[index]
            rows = slice(pack.plan.offsets[place], pack.plan.offsets[place + 1])
            found[sample.key] = _Answer(correct[:, rows], sample.prompt_length, sample.answer_length)
        return found


class _Tally:
    """What packs gave: sums of losses and agreement by step, and answers by key."""

    def __init__(self, num_steps: int) -> None:
        self.sums, self.rows = np.zeros(num_steps), np.zeros(num_steps, np.int64)
        self.agreement = Agreement(num_steps)
        self.answers: dict[str, _Answer] = {}
        self.nonfinite: list[str] = []

    def add(self, parts: LossParts, answers: dict[str, _Answer], keys: Sequence[str]) -> None:
        """Add losses and answers of a pack of these samples."""
        sums = parts.step_sums.double().cpu().numpy()
        if not np.isfinite(sums).all():
            self.nonfinite += keys
        self.sums += sums
        self.rows += np.array(parts.counts)
        self.answers |= answers

    def join(self, other: _Tally) -> None:
        """Add what another rank has found."""
        self.sums += other.sums
        self.rows += other.rows
        self.agreement.join(other.agreement)
        self.answers |= other.answers
        self.nonfinite += other.nonfinite

    def require_finite(self) -> None:
        """Refuse losses that are not finite: the draft has broken down, or states of these samples have."""
        if self.nonfinite:
            raise TrainingError(
                f"the held-out loss is not finite in packs of {name_samples(self.nonfinite)}",
                remedy="look at these samples' states with the verify stage, or lower train.learning_rate",
            )

    def loss_by_step(self) -> list[float]:
        """S_k / n_k of all steps."""
        return (self.sums / np.maximum(1, self.rows)).tolist()

    def loss(self, num_steps: int, decay: float) -> float:
        """sum_k decay^k * S_k / n_k over the trained steps."""
        weights = step_weights(self.rows[:num_steps].tolist(), decay)
        return float(sum(weight * total for weight, total in zip(weights, self.sums, strict=False)))


def steps_to_unroll(config: RunConfig) -> int:
    """Steps that an evaluation needs: those that are trained, and those that are drafted in serving."""
    return max(config.train.ttt_steps, config.benchmark.num_speculative_tokens)
