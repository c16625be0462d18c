"""Copies of a training state in host memory, so that training goes on while the copy is written.

Sharded tensors are put together one after the other, so that a GPU holds no more than one of them whole.
Memory is taken once and used again for every later copy; beside a GPU it is pinned, so that the copy runs at
the bus's speed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3_core.training.gather import whole


class HostCopy:
    """Room for one state: nested dictionaries, lists and tuples of tensors and plain values."""

    def __init__(self) -> None:
        self._room: dict[tuple[str, ...], Tensor] = {}

    def take(self, state: Any) -> Any:
        """A copy whose tensors are this object's memory: it is valid until the next `take`.

        Of sharded tensors the other ranks `take_part` at the same point. When it returns, all values have
        arrived: the tensors may be changed.
        """
        devices: set[torch.device] = set()
        copy = self._copy(state, (), devices)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return copy

    def _copy(self, value: Any, path: tuple[str, ...], devices: set[torch.device]) -> Any:
        if isinstance(value, dict):
            return {key: self._copy(item, (*path, str(key)), devices) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(
                self._copy(item, (*path, str(index)), devices) for index, item in enumerate(value)
            )
        if not isinstance(value, Tensor):
            return value
        value = whole(value)
        is_remote = value.device.type == "cuda"
        room = self._room.get(path)
        if room is None or room.shape != value.shape or room.dtype != value.dtype:
            room = torch.empty(value.shape, dtype=value.dtype, pin_memory=is_remote)
            self._room[path] = room
        if is_remote:
            devices.add(value.device)
        room.copy_(value, non_blocking=is_remote)
        return room
