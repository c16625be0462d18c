"""The ranks that share a training: sums over all of them, and what the first one decides.

A rank is a process with one GPU, or with a share of the processors. Numbers that steer training travel over
gloo between host memories; gradients and weights travel where they are. All ranks make the same calls in
the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")
TIMEOUT_HOURS = 24.0
"""A rank waits so long for another, which may be waiting for room on a disk; one that has died is noticed at
once by whoever started it."""


@dataclass(frozen=True)
class Ranks:
    """One rank among others; alone by default.

    Attributes:
        rank: this one, from 0.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes, logs and reports."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, each the same everywhere."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def agree(self, value: Value) -> Value:
        """The first rank's value."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def agree_whether(self, value: bool) -> bool:
        """The first rank's answer; the others wait for it."""
        if self.size == 1:
            return value
        answer = torch.tensor([value], dtype=torch.uint8)
        dist.broadcast(answer, src=0)
        return bool(answer.item())

    def all(self, value: Value) -> list[Value]:
        """Every rank's value, in order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.total([0.0])

    def in_turn(self, act: Callable[[], Value]) -> Value:
        """What `act` returns: the first rank goes ahead, so that the others find done what is done once."""
        if self.is_first:
            value = act()
            self.wait()
            return value
        self.wait()
        return act()

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks the first one's values, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


def join(device: torch.device) -> Ranks:
    """Join the ranks that the environment names, as torchrun sets it; alone where it names none.

    Args:
        device: of this rank.
    """
    if "WORLD_SIZE" not in os.environ:
        return Ranks()
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timedelta(hours=TIMEOUT_HOURS),
        device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
    )
    return Ranks(dist.get_rank(), dist.get_world_size())
