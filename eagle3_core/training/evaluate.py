"""Held-out loss and acceptance of a draft.

Legend: R rows of a pack, n labels, M_k loss rows of step k, K steps unrolled.

One unrolled forward a pack gives all three: the loss of the trained steps, the draft's agreement with the
target's argmax over its FULL vocabulary (a token outside the draft vocabulary is a miss), and the replay of
greedy decoding on the stored answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from eagle3_core.config import RunConfig
from eagle3_core.contracts import AcceptanceFigures
from eagle3_core.serving.acceptance import TargetPass
from eagle3_core.target.weights import FinalHead
from eagle3_core.training.loader import PackReader, ReadAhead, plan_in_order
from eagle3_core.training.loss import LossParts, Teacher, pack_loss, step_weights
from eagle3_core.training.ranks import Ranks
from eagle3_core.training.replay import replay_figures, replay_passes
from eagle3_core.training.sharing import share_packs
from eagle3_core.training.ttt import Pack, ttt_forward

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel


@dataclass(frozen=True)
class StepRates:
    """Agreement with the target's argmax on held-out loss rows, by TTT step.

    Attributes:
        unconditional: share of rows that agree at step k.
        conditional: share of rows that agree at step k among those that agreed at all steps before.
        rows: loss rows of step k.
    """

    unconditional: list[float]
    conditional: list[float | None]
    rows: list[int]


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
    """Evaluates a draft on the held-out split; what belongs to the target is computed once.

    Ranks share the packs, and all get the same evaluation.

    Args:
        reader: packs of the held-out split, planned for `steps_to_unroll(config)` steps.
        config: of the run.
        benchmark_keys: samples that the benchmark decodes.
        head: the target's norm and full LM head.
        ranks: that share the packs.
    """

    def __init__(
        self,
        reader: PackReader,
        config: RunConfig,
        benchmark_keys: Sequence[str],
        head: FinalHead,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks or Ranks()
        lengths = [sample.num_tokens for sample in reader.samples]
        packs = plan_in_order(lengths, config.train.pack_tokens)
        sizes = [sum(lengths[index] for index in members) for members in packs]
        mine = share_packs(sizes, self._ranks.size)[self._ranks.rank]
        self._plan = [packs[number] for number in mine]
        self._reader, self._config, self._head = reader, config, head
        self._benchmark_keys = tuple(benchmark_keys)
        self._argmax: dict[int, Tensor] = {}

    def evaluate(self, draft: Eagle3DraftModel, teacher: Teacher, target_ids: Tensor) -> Evaluation:
        """Loss, agreement and replayed acceptance.

        Args:
            draft: evaluated as it is, without gradients.
            teacher: the target's norm and head over the draft vocabulary, in the compute dtype.
            target_ids: [D], the target id of each draft id, on the draft's device.
        """
        tally = _Tally(self._reader.num_steps)
        answers: dict[str, _Answer] = {}
        head = draft.lm_head.weight.detach().to(teacher.head.dtype)
        for number, (members, read) in enumerate(zip(self._plan, self._packs(), strict=True)):
            pack = read.to(teacher.head.device)
            with torch.no_grad():
                hidden = ttt_forward(draft, pack, teacher.head.dtype)
                weights = [1.0] * len(hidden)
                kind = self._config.train.loss
                parts = pack_loss(hidden, head, pack.final_states, teacher, pack.plan, weights, kind)
                choices = [target_ids[ids].cpu() for ids in parts.choices]
                if number not in self._argmax:
                    self._argmax[number] = self._full_argmax(pack.final_states)
            tally.add(pack, parts, choices, self._argmax[number])
            answers |= self._answers(pack, choices, members)
        tally, answers = self._of_all_ranks(tally, answers)
        depth, limit = self._config.benchmark.num_speculative_tokens, self._config.benchmark.max_tokens
        whole = [answer.passes() for answer in answers.values()]
        chosen = [answers[key].passes(limit) for key in self._benchmark_keys]
        return Evaluation(
            loss=tally.loss(self._config.train.ttt_steps, self._config.train.step_loss_decay),
            loss_by_step=(tally.sums / np.maximum(1, tally.rows)).tolist(),
            heldout=replay_figures(whole, depth),
            benchmark=replay_figures(chosen, depth),
            rates=tally.rates(),
        )

    def _of_all_ranks(self, tally: _Tally, answers: dict[str, _Answer]) -> tuple[_Tally, dict[str, _Answer]]:
        """The sums over all ranks, and all answers in the order of samples."""
        whole = _Tally(self._reader.num_steps)
        found: dict[str, _Answer] = {}
        for other, others in self._ranks.all((tally, answers)):
            whole.join(other)
            found |= others
        return whole, {sample.key: found[sample.key] for sample in self._reader.samples}

    def _packs(self) -> Iterator[Pack]:
        with ReadAhead(self._reader.packs(self._plan)) as packs:
            yield from packs

    def _full_argmax(self, final_states: Tensor) -> Tensor:
        """[n] target ids: the target's greedy choice over its whole vocabulary."""
        return torch.cat([logits.argmax(-1).cpu() for _, logits in self._head.chunks(final_states)])

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
    """Sums over packs of losses and of agreement with the target's argmax, by step."""

    def __init__(self, num_steps: int) -> None:
        self.sums = np.zeros(num_steps)
        self.rows, self.hits, self.agreed, self.possible = np.zeros((4, num_steps), np.int64)

    def add(self, pack: Pack, parts: LossParts, choices: Sequence[Tensor], argmax: Tensor) -> None:
        """Add a pack: `choices` are target ids, `argmax` [n] those of its labels."""
        self.sums += parts.step_sums.double().cpu().numpy()
        self.rows += np.array(parts.counts)
        alive = np.ones(len(pack.input_ids), bool)
        for step, ids in enumerate(choices):
            plan = pack.plan.steps[step]
            rows = plan.rows[plan.loss]
            right = (ids == argmax[torch.from_numpy(plan.label)]).numpy()
            before, alive = alive[rows], np.zeros_like(alive)
            alive[rows] = before & right
            self.hits[step] += right.sum()
            self.possible[step] += before.sum()
            self.agreed[step] += alive.sum()

    def join(self, other: _Tally) -> None:
        """Add what another rank has counted."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def loss(self, num_steps: int, decay: float) -> float:
        """sum_k decay^k * S_k / n_k over the trained steps."""
        weights = step_weights(self.rows[:num_steps].tolist(), decay)
        return float(sum(weight * total for weight, total in zip(weights, self.sums, strict=False)))

    def rates(self) -> StepRates:
        """Agreement by step."""
        return StepRates(
            unconditional=(self.hits / np.maximum(1, self.rows)).tolist(),
            conditional=[
                int(yes) / int(of) if of else None for yes, of in zip(self.agreed, self.possible, strict=True)
            ],
            rows=self.rows.tolist(),
        )


def steps_to_unroll(config: RunConfig) -> int:
    """Steps that an evaluation needs: those that are trained, and those that are drafted in serving."""
    return max(config.train.ttt_steps, config.benchmark.num_speculative_tokens)
