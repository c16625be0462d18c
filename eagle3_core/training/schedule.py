"""The learning rate as a function of the step alone, so that a resumed run cannot lose it."""

from __future__ import annotations

import math

from eagle3_core.sections import TrainConfig


def learning_rate(train: TrainConfig, step: int, num_steps: int) -> float:
    """Rate of an optimizer step: linear warm-up to the peak, then decay towards 0 after the last step.

    Ten steps, warm-up 0.2, linear: 1/2, 1, 1, 7/8, 6/8, ... 1/8 of the peak.

    Args:
        train: peak, warm-up share and shape.
        step: steps done before this one.
        num_steps: steps of the whole run.
    """
    warmup = max(1, round(train.warmup_fraction * num_steps))
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[train.schedule]
    return train.learning_rate * factor
