"""Speed of training: tokens per second, share of time waiting for data, FLOP utilisation, peak memory."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from eagle3_core.training.flops import peak_flops


@dataclass(frozen=True)
class StepCost:
    """What one optimizer step cost, all ranks together.

    Attributes:
        tokens: packed tokens.
        flops: operations that the mathematics needs.
        seconds: from the end of the step before, waiting included; evaluation and saving not.
        waited: seconds of it in which this rank waited for data.
    """

    tokens: int
    flops: float
    seconds: float
    waited: float

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.tokens + other.tokens,
            self.flops + other.flops,
            self.seconds + other.seconds,
            self.waited + other.waited,
        )


NOTHING = StepCost(tokens=0, flops=0.0, seconds=0.0, waited=0.0)


class Meter:
    """Adds up what steps cost since this process began.

    The first step is the warm-up: kernels are compiled and loaded in it, and read-ahead has only begun. It
    counts for speed only while there is no other.

    Args:
        device: that this rank computes on.
        compute_dtype: of matrix products.
        num_ranks: that share a step.
    """

    def __init__(self, device: torch.device, compute_dtype: str, num_ranks: int = 1) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        peak = peak_flops(name, compute_dtype)
        self._device, self._peak = device, peak * num_ranks if peak else None
        self._warm_up: StepCost | None = None
        self._later: StepCost | None = None

    def add(self, cost: StepCost) -> dict[str, float | None]:
        """Count a step; returns its own figures for the metrics."""
        if self._warm_up is None:
            self._warm_up = cost
        else:
            self._later = cost if self._later is None else self._later + cost
        return {
            "seconds": round(cost.seconds, 6),
            "data_wait_seconds": round(cost.waited, 6),
            "tokens_per_second": _rate(cost.tokens, cost.seconds),
            "mfu": self._utilisation(cost.flops, cost.seconds),
            "peak_memory_gb": round(self.peak_memory_bytes / 1e9, 3),
        }

    @property
    def tokens_per_second(self) -> float | None:
        """Packed tokens of all ranks per second of stepping, without the warm-up; None before a step."""
        return _rate(self._counted.tokens, self._counted.seconds)

    @property
    def warm_up_seconds(self) -> float | None:
        """What the first step of this process took; None before it."""
        return None if self._warm_up is None else self._warm_up.seconds

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time of stepping in which this rank waited for data."""
        return _rate(self._counted.waited, self._counted.seconds)

    @property
    def mfu(self) -> float | None:
        """Operations done over those that the devices could do; None where their peak is not known."""
        return self._utilisation(self._counted.flops, self._counted.seconds)

    @property
    def peak_memory_bytes(self) -> int:
        """The most that tensors took on the GPU, or this process in memory, since it began."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def figures(self) -> dict[str, float]:
        """What is known, by name, for whoever watches."""
        known = {
            "tokens_per_second": self.tokens_per_second,
            "warm_up_seconds": self.warm_up_seconds,
            "data_wait_share": self.data_wait_share,
            "mfu": self.mfu,
            "peak_memory_gb": self.peak_memory_bytes / 1e9,
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def _counted(self) -> StepCost:
        return self._later or self._warm_up or NOTHING

    def _utilisation(self, flops: float, seconds: float) -> float | None:
        return _rate(flops, seconds * self._peak) if self._peak else None


def _rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
