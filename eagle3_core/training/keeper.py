"""Keeps a training alive across interruptions: saves and restores it, and remembers what it has found.

Everything that a checkpoint holds passes here. On several ranks each has a keeper with the same history; all
take part in gathering what is sharded, and the first one writes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.nn import Parameter

from eagle3_core.contracts import AcceptanceFigures, EpochMetrics
from eagle3_core.errors import TrainingError
from eagle3_core.sections import TrainConfig
from eagle3_core.training.background import BackgroundSaver
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.gather import parts_of_state, restore_parameters, take_part
from eagle3_core.training.history import History
from eagle3_core.training.metrics_log import MetricsLog
from eagle3_core.training.optimizers import Optimizers

logger = logging.getLogger(__name__)
PARTS = ("parameters", "optimizer", "position", "history", "num_steps", "metrics_bytes", "random")
"""Of a state: without one of them a resumed training would not be the one that was interrupted."""


class Keeper:
    """Saves and restores one training; use as a context manager around its steps.

    Args:
        parameters: that are trained, perhaps sharded.
        optimizers: of these.
        folder: where checkpoints are.
        metrics: the log that is cut back on a resume; None on all ranks but the first.
        train: what is kept and how often it is saved.
        num_steps: of the whole training.
        agree: gives all ranks the first one's answer.

    Attributes:
        history: what is remembered beside weights and position.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        optimizers: Optimizers,
        folder: ResumeFolder,
        metrics: MetricsLog | None,
        train: TrainConfig,
        num_steps: int,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._parameters, self._optimizers = dict(parameters), optimizers
        self._folder, self._metrics, self._train = folder, metrics, train
        self._num_steps, self._agree = num_steps, agree
        self._saver = BackgroundSaver(folder)
        self._last_save = time.monotonic()
        self.history = History()

    def remember(
        self, look: EpochMetrics, benchmark: AcceptanceFigures, position: Callable[[], dict[str, Any]]
    ) -> None:
        """Take note of a look at the held-out split, and save it with the weights if they are among the best.

        Args:
            look: what was found.
            benchmark: the benchmark's prompts replayed.
            position: where training goes on.
        """
        new_best = self.history.add(look, benchmark, self._train.keep_best)
        self._save(position(), look.step, new_best)

    def save_if_due(self, step: int, position: Callable[[], dict[str, Any]]) -> None:
        """Save if it is time and the checkpoint before is written; raises what that could not do."""
        self._saver.check()
        is_time = time.monotonic() - self._last_save >= self._train.checkpoint_every_seconds
        if self._agree(is_time and not self._saver.is_busy):
            self._save(position(), step)

    def restore(self) -> dict[str, Any] | None:
        """Take up the newest checkpoint; returns its position, None for a fresh start.

        Raises:
            TrainingError: it belongs to another configuration or lacks a part.
            StoreError: none that is there can be read.
        """
        state = self._folder.load(PARTS)
        if state is None:
            self._cut_metrics(0)
            return None
        if state["num_steps"] != self._num_steps:
            raise TrainingError(
                f"the checkpoint is one of a training of {state['num_steps']:,} steps",
                expected=f"{self._num_steps:,} steps",
                remedy="remove the checkpoint's folder to train from the start",
            )
        restore_parameters(self._parameters, state["parameters"])
        self._optimizers.load_state(parts_of_state(self._parameters, state["optimizer"]))
        self.history = History.read(state["history"])
        torch.set_rng_state(state["random"].clone())
        self._cut_metrics(state["metrics_bytes"])
        return dict(state["position"])

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raises what could not be."""
        self._saver.wait()

    def load_best(self) -> None:
        """Give the parameters the weights of the best evaluation, as the first rank has written them."""
        restore_parameters(self._parameters, self._folder.load_weights(self.history.best_files(1)[0]))

    @property
    def blocked_seconds(self) -> float:
        """Time in which training stood still for its checkpoints."""
        return self._saver.blocked_seconds

    def _save(self, position: dict[str, Any], step: int, new_best: str | None = None) -> None:
        self._last_save = time.monotonic()
        state: dict[str, Any] = {"parameters": self._parameters, "optimizer": self._optimizers.state()}
        if self._metrics is None:
            take_part(state)
            return
        state |= {
            "position": position,
            "history": self.history.document(),
            "num_steps": self._num_steps,
            "metrics_bytes": self._metrics.sync(),
            "random": torch.get_rng_state(),
        }
        best = self.history.best_files(self._train.keep_best)
        self._saver.save(state, step, best, new_best)

    def _cut_metrics(self, length: int) -> None:
        if self._metrics is not None:
            self._metrics.cut(length)

    def __enter__(self) -> Keeper:
        self._saver.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saver.__exit__(kind, value, trace)
