"""The training loop: fixed packs by seed and epoch, exact resume, the best epoch by held-out acceptance.

An optimizer step is one pack. The state of a run is the weights, the optimizer and a small `Position`; the
order of packs and the learning rate follow from the configuration and the step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3_core.config import RunConfig
from eagle3_core.contracts import AcceptanceFigures, EpochMetrics
from eagle3_core.errors import TrainingError
from eagle3_core.training.checkpoint import ResumeFolder, weights_name
from eagle3_core.training.draft import DTYPES, teacher_of, trained_parameters
from eagle3_core.training.epoch_data import EpochData
from eagle3_core.training.evaluate import Evaluation
from eagle3_core.training.loader import PackReader, ReadAhead, plan_packs
from eagle3_core.training.loss import LossParts, Teacher, pack_loss, step_weights
from eagle3_core.training.metrics_log import MetricsLog
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
        skipped_packs: packs without a loss row.
        epochs: finished epochs.
        best: index of the best of them.
        best_file: its weights.
        benchmark: replay of the benchmark's prompts at the best epoch.
        metrics_bytes: length of `metrics.jsonl`.
    """

    step: int = 0
    epoch: int = 0
    pack: int = 0
    loss_sums: list[float] = field(default_factory=list)
    loss_rows: list[int] = field(default_factory=list)
    seconds: float = 0.0
    skipped_packs: int = 0
    epochs: list[dict[str, Any]] = field(default_factory=list)
    best: int | None = None
    best_file: str | None = None
    benchmark: dict[str, Any] | None = None
    metrics_bytes: int = 0

    def start_epoch(self, epoch: int, num_steps: int) -> None:
        """Move to the first pack of an epoch."""
        self.epoch, self.pack, self.seconds = epoch, 0, 0.0
        self.loss_sums, self.loss_rows = [0.0] * num_steps, [0] * num_steps


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves beside the weights, which the draft then holds."""

    num_steps: int
    resumed_from_step: int | None
    tokens_per_second: float | None
    epochs: list[EpochMetrics]
    best_epoch: int
    benchmark: AcceptanceFigures
    skipped_packs: int


class Trainer:
    """Trains a draft; see the module's first lines.

    Args:
        draft: in fp32; gets the best epoch's weights at the end.
        config: of the run.
        reader: packs of the training split.
        evaluate: looks at the held-out split after each epoch.
        resume: where checkpoints are kept.
        metrics: the log of steps and epochs.
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
        self.evaluate, self.resume, self.metrics, self.progress = evaluate, resume, metrics, progress
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
        self._session_tokens, self._session_seconds = 0, 0.0
        self._data = EpochData(reader.source)
        self._last_save = time.monotonic()

    def run(self) -> Outcome:
        """Train to the end, from the newest checkpoint if there is one.

        Raises:
            TrainingError: a loss or gradient that is not finite, or a checkpoint of another configuration.
            StoreError: checkpoints that cannot be read.
        """
        resumed = self._restore()
        longest = sum(sample.num_tokens > self.config.train.pack_tokens for sample in self.reader.samples)
        if longest:
            logger.info("%d samples are longer than train.pack_tokens and form packs of their own", longest)
        while self.position.epoch < self.config.train.num_epochs:
            self._epoch()
        return self._finish(resumed)

    def _epoch(self) -> None:
        position = self.position
        plan = self.plans[position.epoch]
        self._data.begin_epoch()
        ahead = ReadAhead(self.reader, plan[position.pack :])
        with ahead as packs:
            for pack in packs:
                self._data.waited_seconds = ahead.waited_seconds
                started = time.monotonic()
                self._step(pack)
                elapsed = time.monotonic() - started
                position.seconds += elapsed
                self._session_seconds += elapsed
                self._report()
                if time.monotonic() - self._last_save >= self.config.train.checkpoint_every_seconds:
                    self._save()
        self._end_epoch()

    def _step(self, pack: Pack) -> None:
        """One optimizer step; a pack without a loss row is counted and changes nothing."""
        position, train = self.position, self.config.train
        rate = learning_rate(train, position.step, self.num_steps)
        position.step, position.pack = position.step + 1, position.pack + 1
        if not len(pack.plan.labels):
            position.skipped_packs += 1
            logger.warning("skipped a pack without a loss row: %s", ", ".join(pack.keys))
            return
        parts = self._losses(pack.to(self.device))
        parts.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), train.max_grad_norm)
        loss, norm_value = float(parts.loss.detach()), float(norm)
        if not math.isfinite(loss) or not math.isfinite(norm_value):
            raise TrainingError(
                f"step {position.step} has loss {loss} and gradient norm {norm_value}; its samples are "
                + ", ".join(pack.keys),
                remedy="look at these samples' states with the verify stage, or lower train.learning_rate",
            )
        self.optimizers.step(rate)
        self.optimizers.zero_grad()
        self._session_tokens += pack.num_tokens
        self._count(parts, loss, norm_value, rate, pack)

    def _losses(self, pack: Pack) -> LossParts:
        train = self.config.train
        hidden = ttt_forward(self.draft, pack, self.teacher.head.dtype)
        weights = step_weights(pack.plan.counts, train.step_loss_decay)
        head = self.draft.lm_head.weight if self.config.draft.train_lm_head else self.teacher.head
        return pack_loss(hidden, head, pack.final_states, self.teacher, pack.plan, weights, train.loss)

    def _count(self, parts: LossParts, loss: float, norm: float, rate: float, pack: Pack) -> None:
        position = self.position
        sums = parts.step_sums.tolist()
        position.loss_sums = [a + b for a, b in zip(position.loss_sums, sums, strict=True)]
        position.loss_rows = [a + b for a, b in zip(position.loss_rows, parts.counts, strict=True)]
        self.metrics.append(
            [
                {
                    "type": "step",
                    "step": position.step,
                    "epoch": position.epoch,
                    "loss": loss,
                    "loss_by_step": [total / max(1, n) for total, n in zip(sums, parts.counts, strict=True)],
                    "loss_rows": parts.counts,
                    "tokens": pack.num_tokens,
                    "grad_norm": norm,
                    "learning_rate": rate,
                    "samples": list(pack.keys),
                }
            ]
        )

    def _report(self) -> None:
        position = self.position
        figures: dict[str, Any] = dict(self._data.figures())
        self.progress(
            position.step,
            self.num_steps,
            "steps",
            f"epoch {position.epoch + 1} of {self.config.train.num_epochs}",
            loss=self._epoch_loss(),
            tokens_per_second=self._speed() or 0.0,
            **figures,
        )

    def _speed(self) -> float | None:
        return self._session_tokens / self._session_seconds if self._session_seconds else None

    def _epoch_loss(self) -> float:
        """sum_k decay^k * S_k / n_k over the packs of this epoch so far."""
        weights = step_weights(self.position.loss_rows, self.config.train.step_loss_decay)
        return sum(w * total for w, total in zip(weights, self.position.loss_sums, strict=True))

    def _end_epoch(self) -> None:
        position, train = self.position, self.config.train
        started = time.monotonic()
        found = self.evaluate(self.draft, self.teacher)
        metrics = EpochMetrics(
            epoch=position.epoch,
            step=position.step,
            train_loss=self._epoch_loss(),
            heldout_loss=found.loss,
            heldout=found.heldout,
            learning_rate=learning_rate(train, max(0, position.step - 1), self.num_steps),
            seconds=position.seconds + time.monotonic() - started,
        )
        record = metrics.model_dump(mode="json")
        data = self._data.figures()
        self.metrics.append([{"type": "epoch", **record, "rates": asdict(found.rates), "data": data}])
        _log_epoch(metrics, train.num_epochs, self._speed())
        logger.info("%s", self._data.line())
        position.epochs.append(record)
        best = position.best
        if best is None or metrics.heldout.acceptance_length > _acceptance(position.epochs[best]):
            position.best = position.epoch
            position.best_file = weights_name(position.step)
            weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
            self.resume.save_weights(position.best_file, weights)
            position.benchmark = found.benchmark.model_dump(mode="json")
        position.start_epoch(position.epoch + 1, train.ttt_steps)
        self._save()

    def _save(self) -> None:
        self.position.metrics_bytes = self.metrics.sync()
        state = {
            "parameters": {name: parameter.detach() for name, parameter in self.parameters.items()},
            "optimizer": self.optimizers.state(),
            "position": asdict(self.position),
            "num_steps": self.num_steps,
            "random": torch.get_rng_state(),
        }
        best = self.position.best_file
        self.resume.save(state, self.position.step, [best] if best else [])
        self._last_save = time.monotonic()

    def _restore(self) -> int | None:
        """Take up the newest checkpoint; returns its step, or None for a fresh start."""
        state = self.resume.load()
        if state is None:
            self.metrics.cut(0)
            return None
        shapes = {name: tuple(tensor.shape) for name, tensor in state["parameters"].items()}
        ours = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        if shapes != ours or state["num_steps"] != self.num_steps:
            wrong = sorted(name for name in shapes.keys() | ours.keys() if shapes.get(name) != ours.get(name))
            raise TrainingError(
                f"the checkpoint has {state['num_steps']:,} steps and "
                + (f"{wrong[0]} of shape {shapes.get(wrong[0])}" if wrong else "the same tensors"),
                expected=f"{self.num_steps:,} steps" + (f" and shape {ours.get(wrong[0])}" if wrong else ""),
                remedy="remove the checkpoint's folder to train from the start",
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self.optimizers.load_state(state["optimizer"])
        self.position = Position(**state["position"])
        torch.set_rng_state(state["random"])
        self.metrics.cut(self.position.metrics_bytes)
        logger.info("resuming from step %d of %d", self.position.step, self.num_steps)
        return self.position.step

    def _finish(self, resumed: int | None) -> Outcome:
        position = self.position
        assert position.best is not None
        assert position.best_file is not None
        best: dict[str, Tensor] = self.resume.load_weights(position.best_file)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(best[name])
        return Outcome(
            num_steps=position.step,
            resumed_from_step=resumed,
            tokens_per_second=self._speed(),
            epochs=[EpochMetrics.model_validate(epoch) for epoch in position.epochs],
            best_epoch=position.best,
            benchmark=AcceptanceFigures.model_validate(position.benchmark),
            skipped_packs=position.skipped_packs,
        )


def _acceptance(epoch: dict[str, Any]) -> float:
    return epoch["heldout"]["acceptance_length"]


def _log_epoch(metrics: EpochMetrics, num_epochs: int, speed: float | None) -> None:
    rates: Sequence[float] = metrics.heldout.per_position
    logger.info(
        "epoch %d of %d: loss %.3f, held-out loss %.3f, held-out acceptance length %.3f (K=%d, n=%d; "
        "by position %s), %.0f tokens/s, %.1f s",
        metrics.epoch + 1,
        num_epochs,
        metrics.train_loss,
        metrics.heldout_loss,
        metrics.heldout.acceptance_length,
        metrics.heldout.num_speculative_tokens,
        metrics.heldout.num_samples,
        " ".join(f"{rate:.3f}" for rate in rates),
        speed or 0.0,
        metrics.seconds,
    )
