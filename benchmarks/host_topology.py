"""A part of the host benchmark: what the host has, how its GPUs are linked, and how fast sums travel."""

from __future__ import annotations

import ctypes
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
PEER_QUESTIONS = {"read": 0, "nvlink": 2}
"""What the driver is asked of a pair of GPUs: `nvmlGpuP2PCapsIndex_t` of nvml.h. The package has the first as
a tuple."""


def measure(spec: PartSpec) -> None:
    """Look at host and GPUs, write files, and sum over all ranks; what fails does not keep the others back.

    Raises:
        RuntimeError: something could not be found out; says what.
    """
    found, failed = host_facts(spec), []
    spec.save(found)
    for ask in (ask_gpus, write_files, sum_over_ranks):
        try:
            found |= ask(spec)
        except Exception as error:
            failed.append(f"{ask.__name__}: {type(error).__name__}: {error}")
            tell(failed[-1])
        spec.save(found)
    if failed:
        raise RuntimeError("; ".join(failed))


def host_facts(spec: PartSpec) -> dict[str, Any]:
    """Processors, memory, disk and the variables that keep multicast off."""
    return {
        "platform": platform.platform(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "free_disk_bytes": psutil.disk_usage(spec.folder).free,
        "environment": {name: os.environ.get(name) for name in NO_MULTICAST},
    }


def ask_gpus(spec: PartSpec) -> dict[str, Any]:
    """What the driver says of the GPUs; nothing on the CPU."""
    if spec.device != "cuda":
        return {}
    facts = gpu_facts(spec.devices)
    tell(f"driver {facts['driver']}: {', '.join(gpu['name'] for gpu in facts['gpus'])}")
    return facts


def write_files(spec: PartSpec) -> dict[str, Any]:
    """How fast one file is written, and one for each GPU at once."""
    folder, size = Path(spec.folder), FILE_BYTES[spec.shape]
    found = {"write_one_bytes_per_second": write_speed(folder, 1, size)}
    if spec.gpus > 1:
        found["write_all_bytes_per_second"] = write_speed(folder, spec.gpus, size)
    return found


def sum_over_ranks(spec: PartSpec) -> dict[str, Any]:
    """Bandwidth of sums over all GPUs."""
    if spec.gpus == 1:
        tell("all-reduce: one GPU has no other to send to")
        return {"all_reduce": {"skipped": "one GPU has no other to send to"}}
    return {"all_reduce": {"sizes": all_reduce.measure(spec.gpus, spec.device)}}


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
        gpus = [
            {
                "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                "num_nvlinks": _num_links(handle),
            }
            for handle in handles
        ]
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return {"driver": driver, "gpus": gpus, "peers": peers(handles), "topology": topology_text()}
    finally:
        pynvml.nvmlShutdown()


def peers(handles: Sequence[Any]) -> dict[str, list[list[str]]]:
    """For each pair of GPUs what the driver says of reading and of NVLink: `ok` or why not.

    Args:
        handles: of the GPUs, from `pynvml`.
    """
    import pynvml

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
        except (pynvml.NVMLError, TypeError, ctypes.ArgumentError) as error:
            return f"cannot be asked: {error}"

    return {
        name: [[status(one, other, index) for other in handles] for one in handles]
        for name, index in PEER_QUESTIONS.items()
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
