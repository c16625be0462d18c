"""Starts processes for vLLM engines as forks of one process that has imported vLLM: all pay for that once.

vLLM forks its own processes from one that has imported it, too. As there, nothing may touch a GPU before.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import capture_worker

PRELOAD = "benchmarks.vllm_preload"
_context = multiprocessing.get_context("forkserver")


def begin_import(environment: Mapping[str, str], module: str = PRELOAD) -> None:
    """Start the process that imports vLLM, and do not wait for it; call it once.

    Args:
        environment: of that process and of all forks; this process takes it over.
        module: that is imported.
    """
    os.environ.update(environment)
    _context.set_forkserver_preload([module])
    forkserver.ensure_running()


class ForkedWorker:
    """A fork that serves `capture_worker`'s commands, with the part of `Popen` that `Worker` uses.

    The first one waits until vLLM is imported.

    Args:
        spec: the file that says what is measured.
        mode: `plain` or `capture`.
        variables: of the environment, on top of what `begin_import` was given.
        serve: what the fork does with specification and mode.
    """

    def __init__(
        self,
        spec: Path,
        mode: str,
        variables: Mapping[str, str],
        serve: Callable[[str, str], None] = capture_worker.serve,
    ) -> None:
        commands, to_commands = _context.Pipe(duplex=False)
        answers, to_answers = _context.Pipe(duplex=False)
        self._process = _context.Process(
            target=_be_fork, args=(serve, str(spec), mode, dict(variables), commands, to_answers)
        )
        self._process.start()
        for theirs in (commands, to_answers):
            theirs.close()
        self.stdin = os.fdopen(os.dup(to_commands.fileno()), "w")
        self.stdout = os.fdopen(os.dup(answers.fileno()))
        for ours in (to_commands, answers):
            ours.close()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("capture_worker", timeout or 0.0)
        return self._process.exitcode


def _be_fork(
    serve: Callable[[str, str], None],
    spec: str,
    mode: str,
    variables: dict[str, str],
    commands: Connection,
    answers: Connection,
) -> None:
    """Pipes become standard input and output; then serve."""
    os.environ.update(variables)
    os.dup2(commands.fileno(), 0)
    for number in (1, 2):
        os.dup2(answers.fileno(), number)
    commands.close()
    answers.close()
    sys.stdin = os.fdopen(0, closefd=False)
    os.setsid()
    serve(spec, mode)
