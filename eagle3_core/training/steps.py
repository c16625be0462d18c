"""Optimizer steps: which packs belong to one, what they hold together, and which of them this rank computes.

Every rank plans all packs of a step from the loss masks, which it has in memory; so all know how many rows
the step's loss is divided by, what the step costs and who computes which pack, without a word between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee

import numpy as np

from eagle3_core.sections import TrainConfig
from eagle3_core.training.flops import DraftShape, training_flops
from eagle3_core.training.loader import PackReader, plan_packs
from eagle3_core.training.rows import RowPlan, plan_rows
from eagle3_core.training.sharing import group_packs, share_packs
from eagle3_core.training.ttt import Pack


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step, the same on all ranks but for `mine`.

    Attributes:
        number: of the step in its epoch, from 0.
        packs: members of each pack.
        keys: of all samples, pack by pack.
        counts: loss rows of each TTT step in all packs (n_k).
        silent: keys of the samples of packs without a loss row, pack by pack.
        tokens: of all packs.
        flops: of all packs.
        mine: packs that this rank computes; without those that have no loss row.
    """

    number: int
    packs: tuple[tuple[int, ...], ...]
    keys: tuple[str, ...]
    counts: list[int]
    silent: tuple[tuple[str, ...], ...]
    tokens: int
    flops: float
    mine: tuple[int, ...]


@dataclass(frozen=True)
class StepPart:
    """A pack of a step; None once for a rank that has none."""

    step: StepPlan
    pack: Pack | None


class StepReader:
    """Plans optimizer steps of one split and reads this rank's packs of them.

    Args:
        reader: of the split.
        shape: of the draft, for what a pack costs.
        rank: this one, from 0.
        num_ranks: that share each step.
    """

    def __init__(self, reader: PackReader, shape: DraftShape, rank: int = 0, num_ranks: int = 1) -> None:
        self._reader, self._shape = reader, shape
        self._rank, self._num_ranks = rank, num_ranks

    def plan(self, number: int, packs: Sequence[Sequence[int]]) -> StepPlan:
        """The plan of one step.

        Args:
            number: of the step in its epoch.
            packs: members of each of its packs.
        """
        samples = self._reader.samples
        keys = [tuple(samples[index].key for index in members) for members in packs]
        plans = [self._rows(members) for members in packs]
        costs = [training_flops(plan, self._shape) if len(plan.labels) else 0.0 for plan in plans]
        with_loss = [number for number, plan in enumerate(plans) if len(plan.labels)]
        shares = share_packs([costs[number] for number in with_loss], self._num_ranks)
        return StepPlan(
            number=number,
            packs=tuple(tuple(members) for members in packs),
            keys=tuple(key for each in keys for key in each),
            counts=[sum(counts) for counts in zip(*(plan.counts for plan in plans), strict=True)],
            silent=tuple(each for each, plan in zip(keys, plans, strict=True) if not len(plan.labels)),
            tokens=sum(samples[index].num_tokens for members in packs for index in members),
            flops=sum(costs),
            mine=tuple(with_loss[index] for index in shares[self._rank]),
        )

    def parts(self, steps: Sequence[Sequence[Sequence[int]]], first: int = 0) -> Iterator[StepPart]:
        """This rank's packs of an epoch in order, read ahead; every step has one part at least.

        Args:
            steps: members of each pack of each step of the epoch.
            first: step to begin with.

        Raises:
            TrainingError: a shard lacks final states that a loss reads.
            StoreError: a sample cannot be read.
        """
        plans = (self.plan(number, steps[number]) for number in range(first, len(steps)))
        for_packs, here = tee(plans)
        packs = self._reader.packs(_members(for_packs))
        for step in here:
            for _ in step.mine:
                yield StepPart(step, next(packs))
            if not step.mine:
                yield StepPart(step, None)

    def _rows(self, members: Sequence[int]) -> RowPlan:
        masks = [self._reader.loss_mask(index)[1:] for index in members]
        return plan_rows([len(mask) for mask in masks], np.concatenate(masks), self._reader.num_steps)


def plan_steps(lengths: Sequence[int], train: TrainConfig, epoch: int) -> list[list[list[int]]]:
    """Members of each pack of each optimizer step of an epoch; the last step may have fewer packs.

    Args:
        lengths: tokens of each sample.
        train: size of packs, packs of a step, and seed.
        epoch: the order differs from epoch to epoch.
    """
    packs = plan_packs(lengths, train.pack_tokens, train.seed, epoch)
    return [[packs[index] for index in group] for group in group_packs(len(packs), train.packs_per_step)]


def _members(steps: Iterable[StepPlan]) -> Iterator[Sequence[int]]:
    """Members of this rank's packs, step by step."""
    return (step.packs[number] for step in steps for number in step.mine)
