"""Starts and asks the processes of the capture benchmarks, each of which holds an engine."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from benchmarks.capture_worker import PREFIX
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import CaptureError

MEMORY_SECONDS = 0.1
LOG_LINES = 15
LOG_CAUSES = 3
"""Lines that name an error before those: an engine's own process says why before others say that it ended."""
ERROR = re.compile(r"\b\w*(Error|Exception): ")
CLOSE_SECONDS = 20.0


class Process(Protocol):
    """What a worker needs of its process."""

    stdin: Any
    stdout: Any

    @property
    def pid(self) -> int:
        """The process."""

    def poll(self) -> int | None:
        """The exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `TimeoutExpired`."""


def start_process(spec: Path, mode: str, environment: Mapping[str, str]) -> Process:
    """Start `capture_worker` with an interpreter of its own and exactly this environment."""
    command = [sys.executable, "-m", "benchmarks.capture_worker", str(spec), mode]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=PROJECT_ROOT, env=environment, start_new_session=True,
    )  # fmt: skip


class Worker:
    """One engine's process, its answers, and the most memory that it and its children hold.

    Args:
        spec: the file that says what is measured.
        mode: `plain` or `capture`.
        environment: of the process, as `start` takes it.
        watch_memory: whether `peak_bytes` is kept up.
        start: starts the process.
    """

    def __init__(
        self,
        spec: Path,
        mode: str,
        environment: dict[str, str],
        watch_memory: bool = True,
        start: Callable[[Path, str, Mapping[str, str]], Process] = start_process,
    ) -> None:
        self._mode, self._log = mode, spec.parent / f"{mode}.log"
        self._process = start(spec, mode, environment)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.peak_bytes = 0
        threading.Thread(target=self._read, name=f"{mode}-answers", daemon=True).start()
        if watch_memory:
            threading.Thread(target=self._watch, name=f"{mode}-memory", daemon=True).start()

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            CaptureError: the process ended; with lines of its log that say why.
        """
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._answers.get()
        if answer is None:
            lines = self._log.read_text().splitlines()
            causes = [line for line in lines[:-LOG_LINES] if ERROR.search(line)][:LOG_CAUSES]
            text = "\n".join([*causes, *lines[-LOG_LINES:]])
            raise CaptureError(f"the {self._mode} engine ended at `{command}`:\n{text}")
        return answer

    def cpu_seconds(self) -> float:
        """Processor time that the process and its children have used."""
        used = 0.0
        for process in _family(self._process.pid):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            used += times.user + times.system
        return used

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End the process and its children; after so many seconds by force."""
        children = _family(self._process.pid)
        try:
            self._process.stdin.close()
            self._process.wait(seconds)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass
        for process in children:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def _read(self) -> None:
        with self._log.open("a", buffering=1) as log:
            _sort_lines(self._process.stdout, log, self._answers)
        self._answers.put(None)

    def _watch(self) -> None:
        while self._process.poll() is None:
            held = 0
            for process in _family(self._process.pid):
                try:
                    held += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak_bytes = max(self.peak_bytes, held)
            time.sleep(MEMORY_SECONDS)


def ask_all(workers: Sequence[Worker], command: str) -> list[dict[str, Any]]:
    """Send a command to several processes at once and wait for all their answers, in order.

    Raises:
        CaptureError: a process ended; see `Worker.ask`.
    """
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(lambda worker: worker.ask(command), workers))


def close_all(workers: Sequence[Worker], seconds: float = CLOSE_SECONDS) -> None:
    """End several processes at once, each with its children; see `Worker.close`."""
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: worker.close(seconds), workers))


def _sort_lines(lines: IO[str], log: IO[str], answers: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in lines:
        text, separator, answer = line.partition(PREFIX)  # another process may have begun the line
        if separator:
            answers.put(json.loads(answer))
        if text:
            log.write(text.rstrip("\n") + "\n")


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
