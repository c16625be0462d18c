"""Finds and ends a process with everything that it started, also what moved to another session.

A step and its descendants carry `STEP_VARIABLE` in their environment: who started the step, and a token of
that one step. So descendants that lost their parent are still found, and a later run can end what a killed
one left behind without touching anybody else's processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, Field

STEP_VARIABLE = "EAGLE3_STEP"
MAX_ROUNDS = 5
POLL_SECONDS = 0.02


class ProcessId(BaseModel):
    """A process by id and start time, so that a reused id is not taken for it."""

    model_config = ConfigDict(frozen=True)
    pid: int
    start_ticks: int = Field(description="Start in clock ticks since boot; no clock change moves it.")
    namespace: str = Field(default="", description="The namespace that the id belongs to.")

    @classmethod
    def current(cls) -> ProcessId:
        """This process."""
        return cls(pid=os.getpid(), start_ticks=_start_ticks(os.getpid()) or 0, namespace=_namespace())

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """Read what `str()` wrote; None for anything else."""
        try:
            pid, start_ticks, namespace = text.split(":", 2)
            return cls(pid=int(pid), start_ticks=int(start_ticks), namespace=namespace)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.pid}:{self.start_ticks}:{self.namespace}"

    def is_gone(self) -> bool:
        """Whether the process has ended; False where that cannot be known: of another host or container, and
        in a process that has no descriptor left to look with.
        """
        if self.namespace != _namespace():
            return False
        try:
            return _start_ticks(self.pid) != self.start_ticks
        except OSError:
            return False


def step_variable(token: str) -> str:
    """The value of `STEP_VARIABLE` for a step that this process starts."""
    return f"{ProcessId.current()}/{token}"


class ProcessTree:
    """A started process and all that descends from it.

    `update` remembers descendants while their parents still live; call it every few seconds. One thread may
    do so while another ends the tree.
    """

    def __init__(self, pid: int, token: str) -> None:
        self._root = pid
        self._token = token
        self._known: dict[int, psutil.Process] = {}

    def update(self) -> None:
        """Remember the descendants of this moment."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._root)
            self._known |= {child.pid: child for child in [root, *root.children(recursive=True)]}

    def members(self) -> list[psutil.Process]:
        """Living processes of the tree: remembered, of the same session, or with the token."""
        self.update()
        known = [process for process in list(self._known.values()) if _is_alive(process)]
        children = [child for process in known for child in _children(process)]
        strays = [
            process
            for process in psutil.process_iter()
            if _session(process.pid) == self._root or _step_of(process).endswith(f"/{self._token}")
        ]
        found = {process.pid: process for process in [*known, *children, *strays]}
        found.pop(os.getpid(), None)
        return [process for process in found.values() if _is_alive(process)]

    def end(self, grace_seconds: float = 5.0) -> int:
        """End every member: SIGTERM, and SIGKILL after the grace. Returns how many were ended."""
        return end_processes(self.members(), grace_seconds) + self._end_late_ones()

    def _end_late_ones(self) -> int:
        ended = 0
        for _ in range(MAX_ROUNDS):
            late = self.members()
            if not late:
                break
            ended += end_processes(late, grace_seconds=0.0)
        return ended


def end_processes(processes: Iterable[psutil.Process], grace_seconds: float) -> int:
    """SIGTERM, wait at most `grace_seconds`, SIGKILL. Returns how many there were; a child is not reaped."""
    alive = list(processes)
    if grace_seconds > 0:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        remaining = _not_ended(alive, grace_seconds)
    else:
        remaining = alive
    for process in remaining:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _not_ended(remaining, 5.0)
    return len(alive)


def _not_ended(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that have not ended after `seconds`; one that only waits for somebody to reap it has."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if not _has_ended(process)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(POLL_SECONDS)
    return left


def end_orphans(grace_seconds: float = 2.0) -> list[int]:
    """End the processes of steps whose starter is gone; returns their process ids."""
    orphans = [process for process in psutil.process_iter() if _is_orphan(process)]
    end_processes(orphans, grace_seconds)
    return [process.pid for process in orphans]


def _is_orphan(process: psutil.Process) -> bool:
    owner = ProcessId.parse(_step_of(process).rpartition("/")[0])
    return owner is not None and process.pid != os.getpid() and owner.is_gone()


def _step_of(process: psutil.Process) -> str:
    try:
        return process.environ().get(STEP_VARIABLE, "")
    except (psutil.Error, OSError):
        return ""


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _has_ended(process: psutil.Process) -> bool:
    """Whether it is gone with all its threads, and so with all that it held."""
    try:
        if not process.is_running():
            return True
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None for a process that has ended, zombies too."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Tells hosts of one name apart: the kernel makes another at each start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    """Host and pid namespace; every host calls its first namespace the same."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
