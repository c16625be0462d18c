"""The ranks that share a training: sums over all of them, and what the first one decides.

A rank is a process with one GPU, or with a share of the processors. Gradients and weights travel where they
are, and on a GPU so do the few numbers that steer every step, on a stream of their own: it stands still until
they are there. Objects, and waits that may be long, use host memories (gloo). All ranks make the same calls
in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")
CPU = torch.device("cpu")
TIMEOUT_HOURS = 24.0
"""A rank waits so long for another, which may be waiting for room on a disk. Whoever started it notices at
once if one has died, and after `train.stall_timeout_minutes` if they hang."""


@dataclass(frozen=True)
class Ranks:
    """One rank among others; alone by default.

    Attributes:
        rank: this one, from 0.
        size: how many there are.
        device: the GPU of this rank; the CPU if it has none.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        """Whether this rank writes, logs and reports."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, each the same everywhere."""
        if self.size == 1:
            return list(values)
        with _beside(self.device):
            tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
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
        with _beside(self.device):
            answer = torch.tensor([value], dtype=torch.uint8, device=self.device)
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
        """Wait until all ranks are here, however long that is, and have what was sent before.

        So a rank may end afterwards. Its GPU's work ends with it, and others would wait for the rest.
        """
        if self.size == 1:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1))

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
    if on_gpu:
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timedelta(hours=TIMEOUT_HOURS),
        device_id=device if on_gpu else None,
    )
    return Ranks(dist.get_rank(), dist.get_world_size(), device)


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own: what is sent in it does not wait for what is computed."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(_stream(device)):
        yield


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
