"""Facts of this host: processors, memory, disk, and whether local ports can be opened."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.errors import HostError

LOOPBACK = "127.0.0.1"
GIB = 1 << 30


class HostFacts(BaseModel):
    """What the host has. Memory limits of a container are taken into account."""

    model_config = ConfigDict(frozen=True)
    host: str
    platform: str
    num_cpus: int = Field(description="Processors this process may use.")
    memory_total_bytes: int
    memory_available_bytes: int


def inspect_host() -> HostFacts:
    """Look at the host."""
    memory = psutil.virtual_memory()
    limit, used = _cgroup_memory()
    total = min(memory.total, limit) if limit else memory.total
    available = min(memory.available, max(0, limit - used)) if limit else memory.available
    return HostFacts(
        host=socket.gethostname(),
        platform=platform.platform(),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_total_bytes=total,
        memory_available_bytes=available,
    )


def free_disk_bytes(path: Path) -> int:
    """Free space for an unprivileged writer on the file system that `path` is or will be on."""
    return psutil.disk_usage(str(existing_parent(path))).free


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def check_writable(folder: Path, setting: str) -> None:
    """Make `folder` and write a file in it.

    Args:
        folder: the folder.
        setting: the configuration field that names it.

    Raises:
        HostError: it cannot be made or written.
    """
    probe = folder / f".write-test-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0")
        probe.unlink()
    except OSError as error:
        raise HostError(
            f"cannot write to {folder} ({error.strerror or error})",
            remedy=f"set `{setting}` to a folder that can be written",
        ) from error


def check_loopback_port() -> int:
    """Open a free local port as the engine's workers do, and close it. Returns the port.

    Raises:
        HostError: no local port can be opened.
    """
    try:
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            return listener.getsockname()[1]
    except OSError as error:
        raise HostError(
            f"no port can be opened on 127.0.0.1 ({error})", remedy="the engine's processes need one"
        ) from error


def refuse_taken_port(port: int) -> None:
    """Refuse a local port on which somebody listens.

    Raises:
        HostError: names the port.
    """
    with socket.socket() as probe:
        probe.settimeout(2.0)
        if probe.connect_ex((LOOPBACK, port)) == 0:
            raise HostError(
                f"something listens on {LOOPBACK}:{port} already",
                remedy="end it, or set capture.sglang_port to a free port",
            )


def _cgroup_memory() -> tuple[int, int]:
    """Limit and use of this process's memory group in bytes; (0, 0) where there is no limit.

    Reclaimable file cache does not count as use.
    """
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0, 0
    if limit == "max":
        return 0, 0
    return int(limit), used - int(statistics.get("inactive_file", 0))
