"""Memory of the GPUs, asked of the driver: no CUDA context is made, so no memory is taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile

from pydantic import BaseModel, ConfigDict


class GpuMemory(BaseModel):
    """Memory of one GPU."""

    model_config = ConfigDict(frozen=True)
    device: str
    total_bytes: int
    free_bytes: int


def visible_gpus(named: str | None = None) -> list[str]:
    """The GPUs that an engine would see, as `CUDA_VISIBLE_DEVICES` names them; empty without a driver.

    CUDA reads the variable up to the first entry that names none, e.g. -1.

    Args:
        named: value of `CUDA_VISIBLE_DEVICES` in the engine's environment; None takes this process's.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES") if named is None else named
    if named is not None:
        devices = (device.strip() for device in named.split(","))
        return list(takewhile(lambda device: device and not device.startswith("-"), devices))
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def gpu_memory(devices: Sequence[str]) -> list[GpuMemory] | None:
    """Memory of GPUs named as in `CUDA_VISIBLE_DEVICES`, by index or UUID; None where no driver answers."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return [_memory(device) for device in devices]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _memory(device: str) -> GpuMemory:
    import pynvml

    handle = (
        pynvml.nvmlDeviceGetHandleByIndex(int(device))
        if device.isdecimal()
        else pynvml.nvmlDeviceGetHandleByUUID(device)
    )
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuMemory(device=device, total_bytes=int(memory.total), free_bytes=int(memory.free))
