"""Copies packs to a GPU while it works on others."""

from __future__ import annotations

from dataclasses import replace

import torch

from eagle3_core.training.ttt import Pack


class Sender:
    """A stream of copies of its own; `Pack.to` makes the trainer's stream wait for the one it needs.

    Args:
        device: a GPU; without an index the current one of this thread, whichever thread sends.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)

    def send(self, pack: Pack) -> Pack:
        """The pack on its way to the GPU; from pinned memory nobody waits for it."""
        with torch.cuda.stream(self._stream):
            there = pack.to(self._device)
            return replace(there, sent=self._stream.record_event())
