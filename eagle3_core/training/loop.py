"""The training loop: fixed packs by seed and epoch, exact resume, the best weights by held-out acceptance.

An optimizer step is one pack. The state of a run is the weights, the optimizer, a small `Position` and a
`History`; the order of packs and the learning rate follow from the configuration and the step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from eagle3_core.config import RunConfig
from eagle3_core.contracts import EpochMetrics
from eagle3_core.errors import TrainingError
from eagle3_core.training.agreement import Agreement
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.draft import DTYPES, target_ids_of, teacher_of, trained_parameters
from eagle3_core.training.epoch_data import EpochData
from eagle3_core.training.evaluate import Evaluation
from eagle3_core.training.flops import DraftShape, training_flops
from eagle3_core.training.health import judge_step, name_samples
from eagle3_core.training.history import History
from eagle3_core.training.keeper import Keeper
from eagle3_core.training.loader import PackReader, ReadAhead, plan_packs
from eagle3_core.training.loss import LossParts, Teacher, pack_loss, step_weights
from eagle3_core.training.meter import Meter, StepCost
from eagle3_core.training.metrics_log import MetricsLog
from eagle3_core.training.noise import with_noise
from eagle3_core.training.optimizers import Optimizers
from eagle3_core.training.schedule import learning_rate
from eagle3_core.training.ttt import Pack, ttt_forward

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from eagle3_core.step import Progress

logger = logging.getLogger(__name__)
Evaluate = Callable[["Eagle3DraftModel", Teacher], Evaluation]


@dataclass
class Position:
    """Where a run stands; part of every checkpoint.

    Attributes:
        step: packs done in all epochs.
        epoch: current epoch, from 0.
        pack: packs done in this epoch.
        loss_sums, loss_rows: S_k and n_k of this epoch so far.
        seconds: time spent in this epoch, in all attempts.
    """

    step: int = 0
    epoch: int = 0
    pack: int = 0
    loss_sums: list[float] = field(default_factory=list)
    loss_rows: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def start_epoch(self, epoch: int, num_steps: int) -> None:
        """Move to the first pack of an epoch."""
        self.epoch, self.pack, self.seconds = epoch, 0, 0.0
        self.loss_sums, self.loss_rows = [0.0] * num_steps, [0] * num_steps

    def document(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves beside the weights, which the draft then holds."""

    num_steps: int
    resumed_from_step: int | None
    history: History
    meter: Meter


@dataclass(frozen=True)
class _StepValues:
    """What one optimizer step computed, before it is taken."""

    parts: LossParts
    loss: float
    norm: float
    rate: float


class Trainer:
    """Trains a draft; see the module's first lines.

    Args:
        draft: in fp32; gets the best weights at the end.
        config: of the run.
        reader: packs of the training split.
        evaluate: looks at the held-out split.
        resume: where checkpoints are kept.
        metrics: the log of steps and evaluations.
        progress: told of every step.
    """

    def __init__(
        self,
        draft: Eagle3DraftModel,
        config: RunConfig,
        reader: PackReader,
        evaluate: Evaluate,
        resume: ResumeFolder,
        metrics: MetricsLog,
        progress: Progress,
    ) -> None:
        train = config.train
        self.draft, self.config, self.reader = draft, config, reader
        self.evaluate, self.metrics, self.progress = evaluate, metrics, progress
        self.parameters = trained_parameters(draft)
        self.optimizers = Optimizers(self.parameters, train)
        self.device = next(iter(self.parameters.values())).device
        self.teacher = teacher_of(draft, DTYPES[train.compute_dtype])
        lengths = [sample.num_tokens for sample in reader.samples]
        self.plans = [
            plan_packs(lengths, train.pack_tokens, train.seed, epoch) for epoch in range(train.num_epochs)
        ]
        self.num_steps = sum(len(plan) for plan in self.plans)
        self.position = Position()
        self.position.start_epoch(0, train.ttt_steps)
        self.keeper = Keeper(self.parameters, self.optimizers, resume, metrics, train, self.num_steps)
        self.meter = Meter(self.device, train.compute_dtype)
        self._target_ids = target_ids_of(draft)
        self._shape = DraftShape.of(draft)
        self._data = EpochData(reader.source)

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
        with self.keeper:
            while self.position.epoch < self.config.train.num_epochs and not self._is_stopped():
                self._epoch()
            self.keeper.load_best()
        logger.info("training stood still for %.1f s while it was saved", self.keeper.blocked_seconds)
        return Outcome(self.position.step, resumed, self.history, self.meter)

    def _is_stopped(self) -> bool:
        return bool(self.history.early_stop(self.config.train))

    def _epoch(self) -> None:
        position = self.position
        plan = self.plans[position.epoch]
        self._data.begin_epoch()
        ahead = ReadAhead(self.reader, plan[position.pack :])
        with ahead as packs:
            began, waited = time.monotonic(), 0.0
            for pack in packs:
                self._data.waited_seconds = ahead.waited_seconds
                self._step(pack, began, ahead.waited_seconds - waited)
                self._report()
                if self._is_time_to_look(len(plan)):
                    self._look(is_epoch_end=False)
                    if self._is_stopped():
                        return
                self.keeper.save_if_due(position.step, position.document)
                began, waited = time.monotonic(), ahead.waited_seconds
        self._look(is_epoch_end=True)

    def _is_time_to_look(self, num_packs: int) -> bool:
        every = self.config.train.evaluate_every_steps
        return every is not None and self.position.step % every == 0 and self.position.pack < num_packs

    def _step(self, pack: Pack, began: float, waited: float) -> None:
        """One optimizer step; a pack without a loss row is counted and changes nothing."""
        position, train = self.position, self.config.train
        rate = learning_rate(train, position.step, self.num_steps)
        position.step, position.pack = position.step + 1, position.pack + 1
        if not len(pack.plan.labels):
            self.history.num_empty_packs += 1
            self._leave_out("no row of it carries loss", pack)
            return
        moved = pack.to(self.device)
        parts = self._losses(with_noise(moved, train, self.draft.hidden_size, position.epoch))
        parts.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), train.max_grad_norm)
        values = _StepValues(parts, float(parts.loss.detach()), float(norm), rate)
        is_taken = self._is_taken(values, pack)
        if is_taken:
            self.optimizers.step(rate)
        self.optimizers.zero_grad()
        if is_taken:
            elapsed = time.monotonic() - began
            position.seconds += elapsed
            flops = training_flops(pack.plan, self._shape)
            self._count(values, StepCost(pack.num_tokens, flops, elapsed, waited), pack)

    def _losses(self, pack: Pack) -> LossParts:
        train = self.config.train
        hidden = ttt_forward(self.draft, pack, self.teacher.head.dtype)
        weights = step_weights(pack.plan.counts, train.step_loss_decay)
        head = self.draft.lm_head.weight if self.config.draft.train_lm_head else self.teacher.head
        return pack_loss(hidden, head, pack.final_states, self.teacher, pack.plan, weights, train.loss)

    def _is_taken(self, values: _StepValues, pack: Pack) -> bool:
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
                f"{found}: {verdict.reason}; its samples are {name_samples(pack.keys)}",
                remedy="look at these samples' states with the verify stage, lower train.learning_rate, or "
                "change train.on_nonfinite or train.on_spike",
            )
        if verdict.action == "skip":
            recent.num_skipped += 1
            self._leave_out(f"{found}: {verdict.reason}", pack, loss=values.loss, grad_norm=values.norm)
            return False
        if verdict.reason:
            logger.warning("%s: %s; its samples are %s", found, verdict.reason, name_samples(pack.keys))
        recent.add(values.loss, values.norm, train.spike_window_steps)
        return True

    def _leave_out(self, reason: str, pack: Pack, **values: float) -> None:
        """Name a step that is not taken, in the log and in the metrics."""
        step = self.position.step
        logger.warning("left out step %d, %s; its samples are %s", step, reason, name_samples(pack.keys))
        finite = {name: value if abs(value) < float("inf") else None for name, value in values.items()}
        self._record("skipped", reason=reason, samples=list(pack.keys), **finite)

    def _count(self, values: _StepValues, cost: StepCost, pack: Pack) -> None:
        position, parts = self.position, values.parts
        sums = parts.step_sums.tolist()
        position.loss_sums = [a + b for a, b in zip(position.loss_sums, sums, strict=True)]
        position.loss_rows = [a + b for a, b in zip(position.loss_rows, parts.counts, strict=True)]
        self._record(
            "step",
            loss=values.loss,
            loss_by_step=[total / max(1, n) for total, n in zip(sums, parts.counts, strict=True)],
            loss_rows=parts.counts,
            tokens=pack.num_tokens,
            grad_norm=values.norm,
            learning_rate=values.rate,
            **self._agreement(parts, pack),
            samples=list(pack.keys),
            **self.meter.add(cost),
        )

    def _agreement(self, parts: LossParts, pack: Pack) -> dict[str, Any]:
        """How often the draft chose what the target would, before this step; none without labels."""
        if pack.argmax is None or pack.share is None:
            return {}
        agreement = Agreement(len(parts.counts))
        targets = self._target_ids[torch.cat(parts.choices)].cpu().split(parts.counts)
        agreement.add(pack.plan, targets, pack.argmax)
        return agreement.rates().figures() | {"draft_vocabulary_share": round(float(pack.share.mean()), 4)}

    def _record(self, kind: str, **fields: Any) -> None:
        where = {"step": self.position.step, "epoch": self.position.epoch, "time": round(time.time(), 3)}
        self.metrics.append([{"type": kind, **where, **fields}])

    def _report(self) -> None:
        position, lengths = self.position, self.history.lengths
        figures: dict[str, Any] = {"loss": self._epoch_loss()}
        if lengths:
            figures["acceptance_length"] = lengths[-1]
        figures |= self.meter.figures() | self._data.figures()
        self.progress(
            position.step,
            self.num_steps,
            "steps",
            f"epoch {position.epoch + 1} of {self.config.train.num_epochs}",
            **figures,
        )

    def _epoch_loss(self) -> float:
        """sum_k decay^k * S_k / n_k over the packs of this epoch so far."""
        weights = step_weights(self.position.loss_rows, self.config.train.step_loss_decay)
        return sum(w * total for w, total in zip(weights, self.position.loss_sums, strict=True))

    def _look(self, is_epoch_end: bool) -> None:
        """Look at the held-out split, and save what was found with the weights if they are among the best."""
        position, train = self.position, self.config.train
        started = time.monotonic()
        found = self.evaluate(self.draft, self.teacher)
        position.seconds += time.monotonic() - started
        look = EpochMetrics(
            epoch=position.epoch,
            step=position.step,
            train_loss=self._epoch_loss(),
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
        _log_look(look, train.num_epochs, self.meter.tokens_per_second)
        logger.info("%s", self._data.line())
        if is_epoch_end:
            position.start_epoch(position.epoch + 1, train.ttt_steps)
        self.keeper.remember(look, found.benchmark, position.document)
        if reason := self.history.early_stop(train):
            logger.info("%s", reason)

    def _restore(self) -> int | None:
        """Take up the newest checkpoint; returns its step, or None for a fresh start."""
        position = self.keeper.restore()
        if position is None:
            return None
        self.position = Position(**position)
        logger.info("resuming from step %d of %d", self.position.step, self.num_steps)
        return self.position.step


def _log_look(look: EpochMetrics, num_epochs: int, speed: float | None) -> None:
    rates: Sequence[float] = look.heldout.per_position
    logger.info(
        "%s %d of %d: loss %.3f, held-out loss %.3f, held-out acceptance length %.3f (K=%d, n=%d; "
        "by position %s), %.0f tokens/s, %.1f s",
        "epoch" if look.is_epoch_end else f"step {look.step}, in epoch",
        look.epoch + 1,
        num_epochs,
        look.train_loss,
        look.heldout_loss,
        look.heldout.acceptance_length,
        look.heldout.num_speculative_tokens,
        look.heldout.num_samples,
        " ".join(f"{rate:.3f}" for rate in rates),
        speed or 0.0,
        look.seconds,
    )
