"""Starts the ranks of a training and watches them: one that ends badly ends all, and none is left behind."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from torch.distributed import TCPStore

from eagle3_core import errors
from eagle3_core.config import PROJECT_ROOT, RunConfig
from eagle3_core.contracts import ProgressEvent, StepFailure, StepOutcome, StepSpec, TrainResult
from eagle3_core.errors import Eagle3Error, RankError, StepError, TrainingError
from eagle3_core.host.gpus import visible_gpus
from eagle3_core.host.lines import parse_line
from eagle3_core.host.process import Supervisor, describe_status
from eagle3_core.host.process_tree import STEP_VARIABLE, ProcessId, step_variable
from eagle3_core.host.running_clock import RunningClock
from eagle3_core.store.files import write_atomic
from eagle3_core.training.sharing import idle_gpus, num_ranks

if TYPE_CHECKING:
    from eagle3_core.step import Progress

logger = logging.getLogger(__name__)
RANK_MODULE = "eagle3_core.training.rank"
HOST = "127.0.0.1"
TAIL_LINES = 40
POLL_SECONDS = 1.0
STACK_SECONDS = 30.0
"""Ranks that stand still have so long to say where."""
STACK_PAUSE_SECONDS = 1.0
"""All is said when nothing more comes for so long."""
RESUMES = "training goes on from its last checkpoint when it runs again"
FOLDER_PREFIX = "eagle3-ranks-"
"""Of temporary folders; the process that made one follows."""


def count_ranks(config: RunConfig) -> int:
    """How many ranks train here; see `num_ranks`. A warning tells of GPUs that are left out.

    Raises:
        TrainingError: fewer GPUs are visible than the configuration names ranks, or none.
    """
    num_devices = 0 if config.engine.device == "cpu" else len(visible_gpus())
    if note := idle_gpus(config, num_devices):
        logger.warning("%s", note)
    return num_ranks(config, num_devices)


def rank_variables(config: RunConfig, count: int) -> list[dict[str, str]]:
    """Environment variables of each rank: its share of the processors, and its GPU."""
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    share = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    if config.engine.device == "cpu":
        return [share] * count
    return [share | {"CUDA_VISIBLE_DEVICES": device} for device in visible_gpus()[:count]]


def run_ranks(spec: StepSpec, progress: Progress, count: int) -> TrainResult:
    """Train with several ranks in processes of their own; all are gone when it returns.

    Args:
        spec: of the step.
        progress: told what the first rank reports.
        count: number of ranks.

    Raises:
        RankError: a rank failed or was killed; names it, and its last line. Or none has done a step for
            `train.stall_timeout_minutes`.
        Eagle3Error: what a rank found wrong, as it would be raised without ranks.
    """
    # The store lives here: ranks meet in it, and none of them is left waiting for a first rank that died.
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    remove_folders_of_the_dead()
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{ProcessId.current()}-") as name:
        folder = Path(name)
        write_atomic(folder / "spec.json", spec.model_dump_json())
        meeting = {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        variables = rank_variables(spec.config, count)
        group = _Group(progress, spec.config.train.stall_timeout_minutes * 60)
        try:
            for rank in range(count):
                group.start(rank, folder, meeting | variables[rank])
            group.watch()
        finally:
            group.end()
        return group.result()


def remove_folders_of_the_dead() -> None:
    """Remove what steps that were killed could not remove themselves."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        owner = ProcessId.parse(path.name.removeprefix(FOLDER_PREFIX).rpartition("-")[0])
        if owner is not None and owner.is_gone():
            shutil.rmtree(path, ignore_errors=True)


class _Rank(threading.Thread):
    """A rank's process; the thread passes on its lines, and its status when it has ended.

    Attributes:
        status: exit status; None while it runs.
        ended_at: when the end of its output was seen.
        was_ended: whether it still ran when it was ended from here.
        tail: its last lines.
    """

    def __init__(
        self, rank: int, folder: Path, variables: Mapping[str, str], events: queue.SimpleQueue[_Event]
    ) -> None:
        super().__init__(name=f"rank-{rank}", daemon=True)
        self.rank, self._events = rank, events
        self._outcome = folder / f"outcome-{rank}.json"
        self.status: int | None = None
        self.ended_at = float("inf")
        self.was_ended = False
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        token = uuid.uuid4().hex
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), STEP_VARIABLE: step_variable(token)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE, str(folder / "spec.json"), str(self._outcome)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | variables | own,
            cwd=PROJECT_ROOT,
        )
        self.supervisor = Supervisor(self._process, token)

    def run(self) -> None:
        try:
            for line in self.supervisor.lines(None, None):
                self._events.put((self, line))
            self.ended_at = time.monotonic()
            self.status = self.supervisor.end()
        except Exception as error:  # its status stays unknown, and it is ended with the others
            self.ended_at = min(self.ended_at, time.monotonic())
            self._events.put((self, f"it cannot be watched any more ({type(error).__name__}: {error})"))
        self._events.put((self, None))

    def end(self) -> None:
        """End it, if it has not ended by itself."""
        if self.status is None:
            self.was_ended = self._process.poll() is None and self.ended_at == float("inf")
            self.status = self.supervisor.end(interrupted=True)

    def ask_where(self) -> None:
        """Let it print what its threads are doing, which a rank does at this signal."""
        self._process.send_signal(signal.SIGUSR1)

    def outcome(self) -> StepOutcome | None:
        """What it left; None if it had no time to."""
        try:
            return StepOutcome.model_validate_json(self._outcome.read_bytes())
        except (OSError, ValidationError):
            return None


_Event = tuple[_Rank, str | None]


class _Group:
    """All ranks of a training.

    Args:
        progress: told what the first rank reports.
        stall_seconds: ranks that have begun to do steps and do none for so long have stalled. Time in which
            this process did not run does not count: nor did they, where the host was suspended.
    """

    def __init__(self, progress: Progress, stall_seconds: float) -> None:
        self._progress, self._stall_seconds = progress, stall_seconds
        self._ranks: list[_Rank] = []
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._is_paused = self._is_stepping = False
        self._clock = RunningClock()
        self._last_step = self._clock.now()

    def start(self, rank: int, folder: Path, variables: Mapping[str, str]) -> None:
        """Start a rank."""
        self._ranks.append(_Rank(rank, folder, variables, self._events))
        self._ranks[-1].start()

    def watch(self) -> None:
        """Pass lines on until all ranks have ended well or one has not.

        Raises:
            RankError: all stand still.
        """
        num_running = len(self._ranks)
        while num_running:
            event = self._receive(POLL_SECONDS)
            if event is None:
                if self._stands_still():
                    self._pass_on_where()
                    raise self._stall_error()
            elif event[1] is None:
                num_running -= 1
                if event[0].status != 0:
                    return

    def _receive(self, seconds: float) -> _Event | None:
        """The next line or end of a rank, a line passed on; None if none comes in so many seconds."""
        try:
            rank, line = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        finally:
            self._clock.now()
        if line is not None:
            self._pass_on(rank, line)
        return rank, line

    def _stands_still(self) -> bool:
        """Whether steps have stopped for too long; a pause for want of room has a limit of its own."""
        is_watched = self._is_stepping and not self._is_paused
        return is_watched and self._clock.now() - self._last_step > self._stall_seconds

    def _pass_on_where(self) -> None:
        """Let all ranks say what they are doing, for the log."""
        silent = set(self._ranks)
        for rank in self._ranks:
            rank.ask_where()
        deadline = time.monotonic() + STACK_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            event = self._receive(min(left, STACK_PAUSE_SECONDS))
            if event is not None:
                silent.discard(event[0])
            elif not silent:
                break

    def end(self) -> None:
        """End what still runs, and pass on what it said last."""
        for rank in self._ranks:
            rank.end()
        for rank in self._ranks:
            rank.join()
        while self._receive(0.0) is not None:
            continue

    def result(self) -> TrainResult:
        """What the first rank left.

        Raises:
            Eagle3Error: see `run_ranks`.
        """
        failed = [rank for rank in self._ranks if rank.status != 0]
        if failed:
            raise _error(min(failed, key=_place), len(self._ranks))
        outcome = self._ranks[0].outcome()
        assert outcome is not None, "a rank that ended well has left its outcome"
        return TrainResult.model_validate(outcome.result)

    def _stall_error(self) -> RankError:
        error = RankError(
            f"the {len(self._ranks)} ranks have done no step for {self._stall_seconds / 60:g} minutes",
            expected="a step within train.stall_timeout_minutes",
            remedy=f"see in the log where each of them stands; {RESUMES}",
        )
        error.details = {"last_lines": {rank.rank: list(rank.tail) for rank in self._ranks}}
        return error

    def _pass_on(self, rank: _Rank, line: str) -> None:
        text, event = parse_line(line)
        if text is not None:
            if text.strip():
                rank.tail.append(text)
            print(text if rank.rank == 0 else f"[rank {rank.rank}] {text}", flush=True)
        if event is not None:
            self._report(event)

    def _report(self, event: ProgressEvent) -> None:
        if event.is_paused or self._is_paused:
            self._progress.pause(event.message if event.is_paused else None)
        self._is_paused = event.is_paused
        self._is_stepping = event.unit == "steps" and event.done != event.total
        self._last_step = self._clock.now()
        if not event.is_paused:
            self._progress(event.done, event.total, event.unit, event.message, force=True, **event.metrics)


def _place(rank: _Rank) -> tuple[bool, float]:
    """Orders ranks that have failed: the one whose end the others followed comes first.

    The others fail when their connections to it close. This process may see their ends first: so each says
    itself when it failed, and one that was killed before this process ended any cannot have followed.
    """
    outcome = rank.outcome()
    failure = outcome.failure if outcome is not None else None
    is_cause = rank.status == -signal.SIGKILL and not rank.was_ended
    return not is_cause, failure.at if failure is not None else rank.ended_at


def _error(rank: _Rank, count: int) -> Eagle3Error:
    """Why training ended: what the rank that failed first has to say, or how it ended."""
    outcome = rank.outcome()
    failure = outcome.failure if outcome is not None else None
    if failure is not None and failure.is_user_error:
        return _known_error(failure)
    name = f"rank {rank.rank} of {count}"
    if failure is not None:
        found = f"{name} failed: {failure.message}"
    else:
        assert rank.status is not None
        last = f"; its last line: {rank.tail[-1].strip()}" if rank.tail else ""
        found = f"{name} {describe_status(rank.status)}{last}"
    error = RankError(found, remedy=RESUMES)
    error.details = {"rank": rank.rank, "status": rank.status, "last_lines": _last_lines(rank.tail, failure)}
    return error


def _last_lines(tail: Sequence[str], failure: StepFailure | None) -> list[str]:
    return failure.traceback.splitlines()[-TAIL_LINES:] if failure is not None else list(tail)


def _known_error(failure: StepFailure) -> Eagle3Error:
    """The error as the rank raised it, of the class that decides what it means to the run."""
    known = getattr(errors, failure.error_type, TrainingError)
    if not issubclass(known, Eagle3Error) or issubclass(known, StepError):
        known = TrainingError
    error: Eagle3Error = known(failure.message)
    error.details = dict(failure.details)
    return error
