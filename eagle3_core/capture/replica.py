"""Starts engine sessions and watches them: time-outs, what they say, and how they end; imports no torch."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core.capture.job import FAILURE_NAME, CaptureJob, Later, session_error
from eagle3_core.capture.session import EVENT_PREFIX, SessionSpec
from eagle3_core.config import PROJECT_ROOT, RunConfig
from eagle3_core.errors import CaptureError, DiskFullError, Eagle3Error
from eagle3_core.host.process import Supervisor, describe_status
from eagle3_core.host.process_tree import STEP_VARIABLE, step_variable
from eagle3_core.host.running_clock import RunningClock
from eagle3_core.store.files import write_atomic

logger = logging.getLogger(__name__)

SESSION_MODULE = "eagle3_core.capture.session"
SPEC_NAME = "session.json"
TAIL_LINES = 20
LOAD_REPORT_SECONDS = 15.0

EndKind = str
"""`done`: it had nothing left to do. `failed`: another engine would fail alike. `died`: another may not."""


@dataclass
class SessionEnd:
    """How a session ended."""

    kind: EndKind
    reason: str = ""
    error: Eagle3Error | None = None
    in_flight: list[str] = field(default_factory=list)
    has_computed: bool = False
    was_paused: bool = False
    was_loaded: bool = False


@dataclass(frozen=True)
class SessionHooks:
    """What a session's events cause; all are called in the replica's thread."""

    take: Callable[[], int | Later | None]
    written: Callable[[int], None]
    tokens: Callable[[int], None]
    loaded: Callable[[], None]
    check: Callable[[], None]
    paused: Callable[[str | None], None]


class _SessionTimeoutError(Exception):
    pass


class Replica:
    """One place where an engine runs: some GPUs, or the CPU.

    Args:
        index: counts from 0; `label` is shown before the lines of its sessions.
        config: the run's.
        target_path: folder of the target.
        variables: environment variables on top of this process's own, e.g. `CUDA_VISIBLE_DEVICES`.
        label: e.g. `[replica 1] `; empty where there is only one.
    """

    def __init__(
        self, index: int, config: RunConfig, target_path: str, variables: dict[str, str], label: str = ""
    ) -> None:
        self.index, self.label = index, label
        self._config, self._target_path, self._variables = config, target_path, variables

    def run(self, job: CaptureJob, hooks: SessionHooks) -> SessionEnd:
        """Run one session over the job and return how it ended; its processes are gone then."""
        folder = Path(job.folder)
        folder.mkdir(parents=True, exist_ok=True)
        spec = SessionSpec(config=self._config, target_path=self._target_path, job=job)
        write_atomic(folder / SPEC_NAME, spec.model_dump_json())
        job.prepare_folder()
        token = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", SESSION_MODULE, str(folder / SPEC_NAME)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | self._variables | {STEP_VARIABLE: step_variable(token)},
            cwd=PROJECT_ROOT,
        )
        watch = _Watch(self, process, job, hooks, self._config)
        supervisor = Supervisor(process, token)
        try:
            for line in supervisor.lines(None, watch.tick):
                watch.handle(line)
            status = supervisor.end()
        except _SessionTimeoutError as timeout:
            supervisor.end(interrupted=True)
            return watch.end("died", str(timeout))
        except BaseException:
            supervisor.end(interrupted=True)
            raise
        return watch.ended(status)


class _Watch:
    """What is known of a running session."""

    def __init__(
        self,
        replica: Replica,
        process: subprocess.Popen[bytes],
        job: CaptureJob,
        hooks: SessionHooks,
        config: RunConfig,
    ) -> None:
        self._replica, self._process, self._job, self._hooks = replica, process, job, hooks
        self._load_seconds = config.capture.load_timeout_minutes * 60
        self._stall_seconds = config.capture.stall_timeout_minutes * 60
        self._clock = RunningClock()
        self._started = self._last_news = self._last_report = self._clock.now()
        self._loaded = False
        self._failure: dict[str, Any] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def handle(self, line: str) -> None:
        """Pass a log line on, or act on an event."""
        text, separator, event = line.partition(EVENT_PREFIX)
        if text.strip() or not separator:
            self._tail.append(text.strip())
            print(f"{self._replica.label}{text}", flush=True)
        if separator:
            try:
                facts = json.loads(event)
            except ValueError:  # another process of the engine wrote into it
                logger.warning("%san event of the session is damaged: %s", self._replica.label, event)
                return
            self._act(facts)

    def tick(self) -> None:
        """Called at least every half second; ends a session that hangs."""
        self._hooks.check()
        now = self._clock.now()
        reason = self._job.paused()
        self._hooks.paused(reason)
        if reason is not None:
            self._last_news = now
        if not self._loaded:
            self._report_load(now)
            if now - self._started > self._load_seconds:
                raise _SessionTimeoutError(
                    f"the engine did not load in {self._load_seconds / 60:g} minutes "
                    "(capture.load_timeout_minutes)"
                )
        elif now - self._last_news > self._stall_seconds:
            raise _SessionTimeoutError(
                f"the engine returned nothing for {self._stall_seconds / 60:g} minutes "
                "(capture.stall_timeout_minutes)"
            )

    def ended(self, status: int) -> SessionEnd:
        """Judge a session whose process has ended."""
        if self._failure is not None:
            error = session_error(*(self._failure[name] for name in ("kind", "found", "expected", "remedy")))
            kind = "died" if self._failure["died"] else "failed"
            return self.end(kind, f"{self._failure['kind']}: {self._failure['found']}", error)
        recorded = self._recorded_failure()
        if recorded is not None:
            return self.end("failed", str(recorded), recorded)
        if status == 0:
            return self.end("done")
        last = f"; its last line: {self._tail[-1]}" if self._tail else ""
        return self.end("died", f"the engine {describe_status(status)}{last}")

    def end(self, kind: EndKind, reason: str = "", error: Eagle3Error | None = None) -> SessionEnd:
        """A `SessionEnd` with what the journal tells."""
        journal = self._job.journal
        was_paused = self._job.paused() is not None
        in_flight = journal.in_flight() if kind == "died" and not was_paused else []
        return SessionEnd(
            kind, reason, error, in_flight, journal.has_finished_any(), was_paused, self._loaded
        )

    def _act(self, event: dict[str, Any]) -> None:
        name = event["event"]
        self._last_news = self._clock.now()
        if name == "loaded":
            self._loaded = True
            logger.info("%sengine loaded in %.1f s", self._replica.label, self._last_news - self._started)
            self._hooks.loaded()
        elif name == "want":
            index = self._hooks.take()
            self._answer("" if index is None else index.value if isinstance(index, Later) else str(index))
        elif name == "tokens":
            self._hooks.tokens(event["tokens"])
        elif name == "written":
            self._hooks.written(event["shard"])
        else:
            self._failure = event

    def _answer(self, text: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{text}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the session has just ended: its exit status says more

    def _report_load(self, now: float) -> None:
        if now - self._last_report >= LOAD_REPORT_SECONDS:
            self._last_report = now
            logger.info(
                "%sloading the engine for %.0f s (ended after %.0f)",
                self._replica.label,
                now - self._started,
                self._load_seconds,
            )

    def _recorded_failure(self) -> CaptureError | DiskFullError | None:
        """What the engine's worker recorded before its driver could say it."""
        if not (Path(self._job.folder) / FAILURE_NAME).exists():
            return None
        try:
            self._job.raise_failure()
        except (CaptureError, DiskFullError) as error:
            return error
        return None


def replica_variables(config: RunConfig, count: int, devices: list[str]) -> list[dict[str, str]]:
    """Environment variables of each replica: its own GPUs, or its share of the processors.

    Args:
        config: the run's.
        count: number of replicas.
        devices: names of the visible GPUs, as `CUDA_VISIBLE_DEVICES` takes them.

    Raises:
        CaptureError: fewer GPUs than the replicas need.
    """
    engine, size = config.engine, config.engine.tensor_parallel_size
    if engine.device == "cpu":
        threads = max(1, len(os.sched_getaffinity(0)) // (count * size))
        return [{"OMP_NUM_THREADS": str(threads)} if count * size > 1 else {} for _ in range(count)]
    if count * size > len(devices):
        raise CaptureError(
            f"{len(devices)} GPUs are visible",
            expected=f"{count * size} for {count} engines of {size} GPUs each",
            remedy="lower capture.replicas or engine.tensor_parallel_size",
        )
    groups = [devices[index * size : (index + 1) * size] for index in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def num_replicas(config: RunConfig, devices: list[str]) -> int:
    """How many engines run side by side: `capture.replicas`, else as many as the GPUs hold, one on a port."""
    if config.capture.replicas is not None:
        return config.capture.replicas
    is_server = config.capture.engine == "sglang" and config.capture.sglang_port is not None
    if config.engine.device == "cpu" or is_server:
        return 1
    return max(1, len(devices) // config.engine.tensor_parallel_size)
