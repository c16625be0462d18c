"""Where a training stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eagle3_core.training.loss import step_weights


@dataclass
class Position:
    """Where a run stands; part of every checkpoint.

    Attributes:
        step: optimizer steps done in all epochs.
        epoch: current epoch, from 0.
        epoch_step: optimizer steps done in this epoch.
        loss_sums, loss_rows: S_k and n_k of this epoch so far.
        seconds: time spent in this epoch, in all attempts.
        samples: fingerprint of the samples that epochs are planned from.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    loss_sums: list[float] = field(default_factory=list)
    loss_rows: list[int] = field(default_factory=list)
    seconds: float = 0.0
    samples: str = ""

    def start_epoch(self, epoch: int, num_steps: int) -> None:
        """Move to the first step of an epoch; `num_steps` are those of TTT."""
        self.epoch, self.epoch_step, self.seconds = epoch, 0, 0.0
        self.loss_sums, self.loss_rows = [0.0] * num_steps, [0] * num_steps

    def count(self, sums: Sequence[float], rows: Sequence[int]) -> None:
        """Add S_k and n_k of a step."""
        self.loss_sums = [a + b for a, b in zip(self.loss_sums, sums, strict=True)]
        self.loss_rows = [a + b for a, b in zip(self.loss_rows, rows, strict=True)]

    def epoch_loss(self, decay: float) -> float:
        """sum_k decay^k * S_k / n_k over the steps of this epoch so far."""
        weights = step_weights(self.loss_rows, decay)
        return sum(weight * total for weight, total in zip(weights, self.loss_sums, strict=True))

    def document(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)
