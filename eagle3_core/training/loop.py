"""The training loop: fixed packs by seed and epoch, exact resume, the best weights by held-out acceptance.

An optimizer step is a fixed list of packs, shared out among ranks; each computes its packs one after the
other. The state of a run is the weights, the optimizer, a small `Position` and a `History`, the same on all
ranks; the order of packs and the learning rate follow from the configuration and the step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from eagle3_core.config import RunConfig
from eagle3_core.contracts import EpochMetrics
from eagle3_core.errors import TrainingError
from eagle3_core.notices import give_notice, resumed_at
from eagle3_core.training.ahead import ReadAhead
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.epoch_data import EpochData
from eagle3_core.training.evaluate import Evaluation
from eagle3_core.training.flops import DraftShape
from eagle3_core.training.health import judge_step, name_samples
from eagle3_core.training.history import History, describe_look
from eagle3_core.training.keeper import Keeper
from eagle3_core.training.loader import PackReader, fingerprint
from eagle3_core.training.loss import Teacher
from eagle3_core.training.meter import Meter, StepCost
from eagle3_core.training.metrics_log import MetricsLog
from eagle3_core.training.optimizer_step import StepChoices, StepComputer, StepValues
from eagle3_core.training.optimizers import Optimizers
from eagle3_core.training.position import Position
from eagle3_core.training.ranks import Ranks
from eagle3_core.training.schedule import learning_rate
from eagle3_core.training.steps import StepPart, StepPlan, StepReader, plan_steps
from eagle3_core.training.weights import Weights

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3_core.step import Progress

logger = logging.getLogger(__name__)
Evaluate = Callable[["Eagle3DraftModel", Teacher, Callable[[str], None]], Evaluation]
"""Looks at the held-out split; says in a few words how far it is."""
LOOK_REPORT_SECONDS = 15.0


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves beside the weights, which the draft then holds."""

    num_steps: int
    num_planned_steps: int
    resumed_from_step: int | None
    early_stop: str
    history: History
    meter: Meter


class Trainer:
    """Trains a draft; see the module's first lines.

    Args:
        draft: in fp32; gets the best weights at the end.
        weights: of the draft.
        config: of the run.
        reader: packs of the training split.
        evaluate: looks at the held-out split.
        resume: where checkpoints are kept.
        metrics: the log of steps and evaluations; None on all ranks but the first.
        progress: told of every step; called on the first rank alone.
        ranks: that share each step.
    """

    def __init__(
        self,
        draft: Eagle3DraftModel,
        weights: Weights,
        config: RunConfig,
        reader: PackReader,
        evaluate: Evaluate,
        resume: ResumeFolder,
        metrics: MetricsLog | None,
        progress: Progress,
        ranks: Ranks,
    ) -> None:
        train = config.train
        self.draft, self.weights, self.config, self.reader = draft, weights, config, reader
        self.evaluate, self.metrics, self.progress, self.ranks = evaluate, metrics, progress, ranks
        self.resume = resume
        self.optimizers = Optimizers(weights.parameters, train)
        self.computer = StepComputer(draft, weights, config, ranks)
        lengths = [sample.num_tokens for sample in reader.samples]
        self.plans = [plan_steps(lengths, train, epoch) for epoch in range(train.num_epochs)]
        self.num_steps = sum(len(plan) for plan in self.plans)
        self.position = Position(samples=fingerprint(reader.samples))
        self.position.start_epoch(0, train.ttt_steps)
        self.keeper = Keeper(
            weights.parameters, self.optimizers, resume, metrics, train, self.num_steps, ranks.agree_whether
        )
        self.meter = Meter(self.computer.device, train.compute_dtype, ranks.size)
        self._steps = StepReader(reader, DraftShape.of(draft), ranks.rank, ranks.size)
        self._data = EpochData(reader.source)
        self._last_report = time.monotonic()

    @property
    def history(self) -> History:
        """What earlier steps and evaluations found."""
        return self.keeper.history

    def run(self) -> Outcome:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            TrainingError: a step that policy does not take, or a checkpoint of another configuration.
            StoreError: checkpoints that cannot be read or written.
        """
        resumed = self._restore()
        longest = sum(sample.num_tokens > self.config.train.pack_tokens for sample in self.reader.samples)
        if longest:
            logger.info("%d samples are longer than train.pack_tokens and form packs of their own", longest)
        with self.keeper, contextlib.ExitStack() as stack:
            if self.metrics is not None:
                stack.callback(self.metrics.close)
            while self.position.epoch < self.config.train.num_epochs and not self._early_stop():
                self._epoch()
            self.keeper.wait()
            self.ranks.wait()  # however long a full disk keeps the first one
            self.keeper.load_best()
        logger.info("training stood still for %.1f s while it was saved", self.keeper.blocked_seconds)
        early_stop = self._early_stop()
        return Outcome(self.position.step, self.num_steps, resumed, early_stop, self.history, self.meter)

    def _early_stop(self) -> str:
        """Why training ends here; empty while it should not, and where it has come to its end anyway."""
        is_over = self.position.step >= self.num_steps
        return "" if is_over else self.history.early_stop(self.config.train)

    def _epoch(self) -> None:
        position = self.position
        plan = self.plans[position.epoch]
        self._data.begin_epoch()
        ahead = ReadAhead(self._steps.parts(plan, position.epoch_step))
        with ahead as parts:
            began, waited = time.monotonic(), 0.0
            for _, of_step in groupby(parts, key=lambda part: part.step.number):
                ended = self._step(of_step, began, partial(_waited_since, ahead, waited))
                waited = self._data.waited_seconds = ahead.waited_seconds
                self._report()
                began = ended + self._pause(len(plan))
                if self._early_stop():
                    return
        self._look(is_epoch_end=True)

    def _pause(self, num_steps: int) -> float:
        """Look and save where it is time; returns the seconds that this took."""
        seconds = 0.0
        if self._is_time_to_look(num_steps):
            started = time.monotonic()
            self._look(is_epoch_end=False)
            seconds = time.monotonic() - started
        blocked = self.keeper.blocked_seconds
        self.keeper.save_if_due(self.position.step, self.position.document)
        return seconds + self.keeper.blocked_seconds - blocked

    def _is_time_to_look(self, num_steps: int) -> bool:
        every = self.config.train.evaluate_every_steps
        return every is not None and self.position.step % every == 0 and self.position.epoch_step < num_steps

    def _step(self, parts: Iterator[StepPart], began: float, waited: Callable[[], float]) -> float:
        """One optimizer step; one without a loss row on any rank is counted and changes nothing.

        Args:
            parts: this rank's packs of it, one part at least.
            began: when the step before ended.
            waited: seconds that this rank has waited for data since then.

        Returns:
            When it ended.
        """
        position = self.position
        rate = learning_rate(self.config.train, position.step, self.num_steps)
        position.step, position.epoch_step = position.step + 1, position.epoch_step + 1
        first = next(parts)
        plan = first.step
        self.history.num_empty_packs += len(plan.silent)
        if not any(plan.counts):
            self._leave_out("no row of it carries loss", plan)
            return time.monotonic()
        self._tell_silent(plan)
        packs = (part.pack for part in chain([first], parts) if part.pack)
        values = self.computer.compute(plan, packs, position.epoch)
        is_taken = self._is_taken(values, plan)
        if is_taken:
            self.optimizers.step(rate)
        self.optimizers.zero_grad()
        if not is_taken:
            return time.monotonic()
        choices = self.computer.choices()
        ended = time.monotonic()
        position.seconds += ended - began
        cost = StepCost(plan.tokens, plan.flops, ended - began, waited())
        self._count(values, choices, rate, cost, plan)
        return ended

    def _tell_silent(self, plan: StepPlan) -> None:
        for keys in plan.silent:
            step, names = self.position.step, name_samples(keys)
            self._warn("no row of a pack of step %d carries loss; its samples are %s", step, names)

    def _is_taken(self, values: StepValues, plan: StepPlan) -> bool:
        """Whether the step is sound enough to be taken; says so where it is odd.

        Raises:
            TrainingError: by policy it ends training.
        """
        recent, train = self.history.recent, self.config.train
        verdict = judge_step(values.loss, values.norm, recent, train)
        recent.num_spikes += verdict.is_spike
        found = f"step {self.position.step} has loss {values.loss:g} and gradient norm {values.norm:g}"
        if verdict.action == "stop":
            raise TrainingError(
                f"{found}: {verdict.reason}; its samples are {name_samples(plan.keys)}",
                remedy="look at these samples' states with the verify stage, lower train.learning_rate, or "
                "change train.on_nonfinite or train.on_spike",
            )
        if verdict.action == "skip":
            recent.num_skipped += 1
            self._leave_out(f"{found}: {verdict.reason}", plan, loss=values.loss, grad_norm=values.norm)
            return False
        if verdict.reason:
            self._warn("%s: %s; its samples are %s", found, verdict.reason, name_samples(plan.keys))
        recent.add(values.loss, values.norm, train.spike_window_steps)
        return True

    def _warn(self, text: str, *values: object) -> None:
        """Say what all ranks find alike; the first one does."""
        if self.ranks.is_first:
            logger.warning(text, *values)

    def _leave_out(self, reason: str, plan: StepPlan, **values: float) -> None:
        """Name a step that is not taken, in the log and in the metrics."""
        step = self.position.step
        self._warn("left out step %d, %s; its samples are %s", step, reason, name_samples(plan.keys))
        finite = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        self._record("skipped", reason=reason, samples=list(plan.keys), **finite)

    def _count(
        self, values: StepValues, choices: StepChoices, rate: float, cost: StepCost, plan: StepPlan
    ) -> None:
        self.position.count(values.sums, plan.counts)
        self._record(
            "step",
            loss=values.loss,
            loss_by_step=[total / max(1, n) for total, n in zip(values.sums, plan.counts, strict=True)],
            loss_rows=plan.counts,
            tokens=plan.tokens,
            grad_norm=values.norm,
            learning_rate=rate,
            **choices.agreement.rates().figures(),
            draft_vocabulary_share=round(choices.share, 4),
            samples=list(plan.keys),
            **self.meter.add(cost),
        )

    def _record(self, kind: str, **fields: Any) -> None:
        if self.metrics is None:
            return
        where = {"step": self.position.step, "epoch": self.position.epoch, "time": round(time.time(), 3)}
        self.metrics.append([{"type": kind, **where, **fields}])

    def _report(self, doing: str = "") -> None:
        """Report where training is; `doing` says what else than steps it does there."""
        self._last_report = time.monotonic()
        if not self.ranks.is_first:
            return
        position, lengths = self.position, self.history.lengths
        figures: dict[str, Any] = {"loss": position.epoch_loss(self.config.train.step_loss_decay)}
        if lengths:
            figures["acceptance_length"] = lengths[-1]
        figures |= self.meter.figures() | self._data.figures()
        where = f"epoch {position.epoch + 1} of {self.config.train.num_epochs}"
        message = f"{where}, {doing}" if doing else where
        self.progress(position.step, self.num_steps, "steps", message, **figures)

    def _report_look(self, doing: str) -> None:
        """Show now and then that a look goes on: whoever watches the ranks takes silence for a hang."""
        if time.monotonic() - self._last_report > LOOK_REPORT_SECONDS:
            self._report(doing)

    def _look(self, is_epoch_end: bool) -> None:
        """Look at the held-out split, and save what was found with the weights if they are among the best."""
        position, train = self.position, self.config.train
        started = time.monotonic()
        with self.weights.whole():
            found = self.evaluate(self.draft, self.computer.teacher, self._report_look)
        position.seconds += time.monotonic() - started
        look = EpochMetrics(
            epoch=position.epoch,
            step=position.step,
            train_loss=position.epoch_loss(train.step_loss_decay),
            heldout_loss=found.loss,
            heldout=found.heldout,
            learning_rate=learning_rate(train, max(0, position.step - 1), self.num_steps),
            seconds=position.seconds,
            is_epoch_end=is_epoch_end,
        )
        self._record(
            "evaluation",
            **look.model_dump(mode="json", exclude={"step", "epoch"}),
            heldout_loss_by_step=found.loss_by_step,
            rates=asdict(found.rates) | {"acceptance_length": found.rates.acceptance_length},
            data=self._data.figures(),
        )
        logger.info("%s", describe_look(look, train.num_epochs, self.meter.tokens_per_second))
        logger.info("%s", self._data.line())
        if is_epoch_end:
            position.start_epoch(position.epoch + 1, train.ttt_steps)
        self.keeper.remember(look, found.benchmark, position.document)
        if reason := self._early_stop():
            give_notice(reason)

    def _restore(self) -> int | None:
        """Take up the newest checkpoint; returns its step, or None for a fresh start.

        Raises:
            TrainingError: ranks have read different ones.
        """
        position = self.keeper.restore()
        steps = self.ranks.all(position["step"] if position else 0)
        if len(set(steps)) > 1:
            raise TrainingError(
                f"the ranks have read checkpoints of the steps {', '.join(map(str, steps))}",
                expected="the same on all",
                remedy="look at the disk of the store, then run the stage train again",
            )
        if position is None:
            return None
        samples, self.position = self.position.samples, Position(**position)
        if self.position.samples not in ("", samples):
            self._warn(
                "the training samples are not those of the checkpoint: some may be seen twice in epoch %d, "
                "or not at all",
                self.position.epoch + 1,
            )
        self.position.samples = samples
        give_notice(resumed_at(self.position.step, self.num_steps))
        return self.position.step


def _waited_since(ahead: ReadAhead[StepPart], waited: float) -> float:
    return ahead.waited_seconds - waited
