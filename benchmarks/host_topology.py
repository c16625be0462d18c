"""A part of the host benchmark: what the host has, how its GPUs are linked, and how fast sums travel."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks import all_reduce
from benchmarks.host_parts import NO_MULTICAST, PartSpec, serve, tell

TOPOLOGY_SECONDS = 20
FILE_BYTES = {"8b": 1 << 30, "tiny": 1 << 22}
BLOCK_BYTES = 1 << 22


def measure(spec: PartSpec) -> None:
    """Look at host and GPUs, write files, and sum over all ranks."""
    folder = Path(spec.folder)
    memory = psutil.virtual_memory()
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total,
        "free_disk_bytes": psutil.disk_usage(spec.folder).free,
        "environment": {name: os.environ.get(name) for name in NO_MULTICAST},
    }
    if spec.device == "cuda":
        found |= gpu_facts(spec.devices)
        tell(f"driver {found['driver']}: {', '.join(gpu['name'] for gpu in found['gpus'])}")
    spec.save(found)
    size = FILE_BYTES[spec.shape]
    found["write_one_bytes_per_second"] = write_speed(folder, 1, size)
    if spec.gpus > 1:
        found["write_all_bytes_per_second"] = write_speed(folder, spec.gpus, size)
    spec.save(found)
    if spec.gpus == 1:
        found["all_reduce"] = {"skipped": "one GPU has no other to send to"}
        tell("all-reduce: one GPU has no other to send to")
    else:
        found["all_reduce"] = {"sizes": all_reduce.measure(spec.gpus, spec.device)}
    spec.save(found)


def gpu_facts(devices: Sequence[str]) -> dict[str, Any]:
    """What the driver says of these GPUs: names, memory, and what links each pair.

    Args:
        devices: as `CUDA_VISIBLE_DEVICES` names them.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(device))
            if device.isdecimal()
            else pynvml.nvmlDeviceGetHandleByUUID(device)
            for device in devices
        ]
        return {
            "driver": _text(pynvml.nvmlSystemGetDriverVersion()),
            "gpus": [
                {
                    "name": _text(pynvml.nvmlDeviceGetName(handle)),
                    "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "num_nvlinks": _num_links(handle),
                }
                for handle in handles
            ],
            "peers": _peers(handles),
            "topology": topology_text(),
        }
    finally:
        pynvml.nvmlShutdown()


def _peers(handles: Sequence[Any]) -> dict[str, list[list[str]]]:
    """For each pair of GPUs what the driver says of reading and of NVLink: `ok` or why not."""
    import pynvml

    capabilities = {"read": pynvml.NVML_P2P_CAPS_INDEX_READ, "nvlink": pynvml.NVML_P2P_CAPS_INDEX_NVLINK}
    names = {
        getattr(pynvml, name): name.removeprefix("NVML_P2P_STATUS_").lower().replace("_", " ")
        for name in dir(pynvml)
        if name.startswith("NVML_P2P_STATUS_")
    }

    def status(one: Any, other: Any, index: int) -> str:
        if one is other:
            return "itself"
        try:
            return names.get(pynvml.nvmlDeviceGetP2PStatus(one, other, index), "unknown")
        except pynvml.NVMLError as error:
            return str(error)

    return {
        name: [[status(one, other, index) for other in handles] for one in handles]
        for name, index in capabilities.items()
    }


def _num_links(handle: Any) -> int | None:
    """NVLinks that are up; None where the driver does not say."""
    import pynvml

    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:
            return up or None
    return up


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def topology_text() -> str:
    """What `nvidia-smi topo -m` prints, or why it cannot be asked."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return "nvidia-smi is not installed"
    try:
        asked = subprocess.run(
            [command, "topo", "-m"], capture_output=True, text=True, timeout=TOPOLOGY_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"nvidia-smi topo -m did not answer in {TOPOLOGY_SECONDS} s"
    return (asked.stdout or asked.stderr).strip()


def write_speed(folder: Path, count: int, num_bytes: int) -> float:
    """Bytes per second that so many files take, written at once and left to the system to make durable.

    Args:
        folder: of the files, which are removed.
        count: of files, each written by a thread.
        num_bytes: of each.
    """
    block = os.urandom(BLOCK_BYTES)
    ready = threading.Barrier(count + 1)
    paths = [folder / f"write-{number}" for number in range(count)]

    def write(path: Path) -> None:
        with path.open("wb", buffering=0) as file:
            ready.wait()
            for _ in range(num_bytes // BLOCK_BYTES):
                file.write(block)

    try:
        with ThreadPoolExecutor(count) as pool:
            writing = [pool.submit(write, path) for path in paths]
            ready.wait()
            started = time.perf_counter()
            for each in writing:
                each.result()
            return count * num_bytes / (time.perf_counter() - started)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    serve(measure)
