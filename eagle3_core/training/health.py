"""Judges an optimizer step before it is taken: values that are not finite, and spikes.

A spike is a loss or a gradient norm (before clipping) far above those of recent steps:

    value > median + spike_factor * max(1.4826 * MAD, median / 10)

with MAD the median absolute deviation of the recent values. Both medians ignore a few outliers, and the tenth
keeps a very even stretch from calling everything a spike. Losses 2.0, 2.1, 1.9, 2.0, ... have a spread of at
least 0.2, so with the default factor of 10 a spike begins above 4.0.

The judgement depends on numbers that all ranks share, so they all decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from eagle3_core.sections import TrainConfig

MIN_RECENT = 16
"""Steps that must have been seen before anything is called a spike."""
NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
LEAST_SPREAD = 0.1
"""Of the median."""
NAMED_SAMPLES = 20
Action = Literal["take", "skip", "stop"]


@dataclass
class RecentSteps:
    """What steps are judged by; part of every checkpoint.

    Attributes:
        losses, norms: of the last steps that were taken, oldest first.
        num_skipped: steps left out as not finite or as spikes.
        num_spikes: spikes, taken or not.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    num_skipped: int = 0
    num_spikes: int = 0

    def add(self, loss: float, norm: float, window: int) -> None:
        """Remember a step that was taken."""
        self.losses = [*self.losses, loss][-window:]
        self.norms = [*self.norms, norm][-window:]

    def document(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """What to do with a step.

    Attributes:
        action: take it, leave it out, or end training.
        reason: why, if it is not an ordinary step; empty otherwise.
        is_spike: whether the reason is a spike.
    """

    action: Action = "take"
    reason: str = ""
    is_spike: bool = False


def judge_step(loss: float, norm: float, recent: RecentSteps, train: TrainConfig) -> Verdict:
    """Whether a step is taken.

    Args:
        loss: of the whole optimizer step, all ranks.
        norm: of its gradient before clipping.
        recent: the steps before it.
        train: policies and limits.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return _by_policy(train.on_nonfinite, "it is not finite", False, recent, train)
    for name, value, values in (("loss", loss, recent.losses), ("gradient norm", norm, recent.norms)):
        limit = spike_limit(values, train.spike_factor)
        if limit is not None and value > limit:
            reason = f"its {name} is above {limit:.4g}, a spike beside the last {len(values)} steps"
            if train.on_spike == "warn":
                return Verdict("take", reason, is_spike=True)
            return _by_policy(train.on_spike, reason, True, recent, train)
    return Verdict()


def spike_limit(values: Sequence[float], factor: float) -> float | None:
    """The greatest value that is no spike; None while too few are known."""
    if len(values) < MIN_RECENT:
        return None
    middle = median(values)
    spread = NORMAL_MAD * median(abs(value - middle) for value in values)
    return middle + factor * max(spread, LEAST_SPREAD * abs(middle))


def _by_policy(
    policy: Literal["stop", "skip"], reason: str, is_spike: bool, recent: RecentSteps, train: TrainConfig
) -> Verdict:
    if policy == "skip" and recent.num_skipped >= train.max_skipped_steps:
        limit = f"{reason}, and train.max_skipped_steps allows {train.max_skipped_steps} steps left out"
        return Verdict("stop", limit, is_spike)
    return Verdict(policy, reason, is_spike)


def name_samples(keys: Sequence[str]) -> str:
    """The keys in one line; of many the first, and how many more there are."""
    named, more = ", ".join(keys[:NAMED_SAMPLES]), len(keys) - NAMED_SAMPLES
    return f"{named} and {more:,} more" if more > 0 else named
