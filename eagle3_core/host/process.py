"""Runs a step in its engine environment and never leaves a part of it behind.

`run_step` is all that the layers above know. How the process is started is in `local_command`: a runner
that starts the same step inside a container needs another command and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from eagle3_core.config import PROJECT_ROOT, resolve_path
from eagle3_core.contracts import RESULT_TYPES, ProgressEvent, StepName, StepOutcome
from eagle3_core.errors import HostError, StepError
from eagle3_core.host.engine_environment import engine_environment
from eagle3_core.host.lines import LineSplitter, Parsed, parse_line
from eagle3_core.host.process_tree import STEP_VARIABLE, ProcessTree, step_variable
from eagle3_core.host.redaction import Redactor
from eagle3_core.sections import EngineConfig
from eagle3_core.store.disk import as_host_error
from eagle3_core.store.files import append, write_atomic

TAIL_LINES = 30
STARTED_MARK = "# started "
"""Begins a step's part of its log, which grows from attempt to attempt."""
POLL_SECONDS = 0.5
TREE_UPDATE_SECONDS = 3.0
QUIET_SECONDS = 1.0
DRAIN_SECONDS = 5.0
GRACE_SECONDS = 5.0

OnLine = Callable[[str], None]
OnProgress = Callable[[ProgressEvent], None]


def run_step(
    name: StepName,
    spec: BaseModel,
    *,
    engine: EngineConfig,
    folder: Path,
    on_line: OnLine | None = None,
    on_progress: OnProgress | None = None,
    on_tick: Callable[[], None] | None = None,
    timeout_seconds: float | None = None,
) -> Any:
    """Run one step to its end and return its typed result.

    Whatever ends this call (success, an exception of a callback, Ctrl-C, a termination signal that raises),
    the step's processes are gone when it returns; if this process is killed, the step ends itself because
    its standard input closes.

    Args:
        name: the step.
        spec: its spec, of the type that `SPEC_TYPES` names.
        engine: the environment to run it in.
        folder: gets `<name>.log` (appended), `<name>.spec.json` and `<name>.result.json`.
        on_line: called in this thread with every log line.
        on_progress: called in this thread with every progress event.
        on_tick: called in this thread at least every half second; may raise to end the step.
        timeout_seconds: a step that runs longer is ended.

    Raises:
        HostError: the interpreter cannot be started or the folder not be written.
        StepError: the step failed, was killed, or ran too long.
    """
    files = _StepFiles(folder, name)
    command = local_command(engine, name, files)
    token = uuid.uuid4().hex
    environment = engine_environment(engine)
    environment |= {STEP_VARIABLE: step_variable(token), "PYTHONFAULTHANDLER": "1"}
    with files.open_log(spec) as log:
        output = _Output(log, Redactor(environment), on_line, on_progress)
        supervisor = Supervisor(_start(command, environment), token)
        try:
            for line in supervisor.lines(timeout_seconds, on_tick):
                output.handle(line)
            status = supervisor.end()
        except BaseException as error:
            supervisor.end(interrupted=True)
            output.record(supervisor.drain())
            if not isinstance(error, TimeoutError):
                raise
            raise _timeout_error(name, files, output.tail, timeout_seconds or 0.0) from None
        finally:
            output.tell_unwritten()
    return _result(name, status, files, output)


class _Output:
    """Sends a step's lines to its log, to the tail and to the callbacks."""

    def __init__(
        self, log: io.FileIO, redact: Redactor, on_line: OnLine | None, on_progress: OnProgress | None
    ) -> None:
        self._log, self.redact = log, redact
        self._on_line, self._on_progress = on_line, on_progress
        self._unwritten = 0
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines that were not empty."""
        return tuple(self._tail)

    def handle(self, line: str) -> None:
        """Record a raw line and report it."""
        text, event = self._parse(line)
        if text is not None and self._on_line:
            self._on_line(text)
        if event is not None and self._on_progress:
            self._on_progress(event)

    def record(self, lines: Iterable[str]) -> None:
        """Record raw lines without reporting them."""
        for line in lines:
            self._parse(line)

    def _parse(self, line: str) -> Parsed:
        parsed = parse_line(self.redact(line))
        if parsed.text is not None:
            self._write(parsed.text)
            if parsed.text.strip():
                self._tail.append(parsed.text)
        return parsed

    def _write(self, text: str) -> None:
        """Add a line to the log; one that cannot be written is counted and does not end the step."""
        try:
            self.tell_unwritten()
            self._log.write(f"{text}\n".encode(errors="replace"))
        except OSError as error:
            self._unwritten += 1
            if self._unwritten == 1 and self._on_line:
                self._on_line(f"WARNING the step's log cannot be written ({error.strerror}); it goes on")

    def tell_unwritten(self) -> None:
        """Say in the log how many lines before could not be written, if it can be written now."""
        if not self._unwritten:
            return
        note = f"{self._unwritten} lines could not be written here\n".encode()
        with contextlib.suppress(OSError):
            if self._log.write(note) == len(note):
                self._unwritten = 0


class _StepFiles:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.log = folder / f"{name}.log"
        self.spec = folder / f"{name}.spec.json"
        self.result = folder / f"{name}.result.json"

    def open_log(self, spec: BaseModel) -> io.FileIO:
        """Write the spec, remove an earlier result and open the log for appending."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.result.unlink(missing_ok=True)
            write_atomic(self.spec, spec.model_dump_json(indent=1))
            log = io.FileIO(self.log, "a")
            append(log, f"{STARTED_MARK}{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC\n".encode(), self.log)
            return log
        except OSError as error:
            raise as_host_error(error) or HostError(
                f"cannot write the log folder {self.folder} ({error})"
            ) from error


def local_command(engine: EngineConfig, name: str, files: _StepFiles) -> list[str]:
    """The command that runs a step in a local virtual environment.

    Raises:
        HostError: the interpreter does not exist.
    """
    return [
        str(engine_interpreter(engine)),
        "-m",
        "eagle3_core.step",
        name,
        str(files.spec),
        str(files.result),
    ]


def engine_interpreter(engine: EngineConfig) -> Path:
    """The engine environment's Python.

    Raises:
        HostError: it does not exist.
    """
    python = resolve_path(engine.python)
    if not python.is_file():
        raise HostError(
            f"the engine environment has no interpreter {python}",
            remedy="make it with `make setup`, or set engine.python",
        )
    return python


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=PROJECT_ROOT,
            start_new_session=True,
        )
    except OSError as error:
        raise HostError(f"cannot start {command[0]} ({error})", remedy="check engine.python") from error


class Supervisor:
    """Reads a started process's lines and ends its process tree.

    Args:
        process: started with pipes for standard input and output.
        token: what `STEP_VARIABLE` in its environment ends with.
    """

    def __init__(self, process: subprocess.Popen[bytes], token: str) -> None:
        self._process = process
        self._tree = ProcessTree(process.pid, token)
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="step-output", daemon=True).start()

    def lines(self, timeout_seconds: float | None, on_tick: Callable[[], None] | None) -> Iterator[str]:
        """Lines until the output ends, or the step has ended and only strays hold its output open."""
        started = last_line = last_update = time.monotonic()
        while True:
            try:
                line = self._queue.get(timeout=POLL_SECONDS)
                if line is None:
                    return
                last_line = time.monotonic()
                yield line
            except queue.Empty:
                if self._process.poll() is not None and time.monotonic() - last_line > QUIET_SECONDS:
                    break
            now = time.monotonic()
            if on_tick:
                on_tick()
            if now - last_update > TREE_UPDATE_SECONDS:
                self._tree.update()
                last_update = now
            if timeout_seconds is not None and now - started > timeout_seconds:
                raise TimeoutError
        self._tree.end(GRACE_SECONDS)
        yield from self.drain()

    def end(self, interrupted: bool = False) -> int:
        """End what still runs and return the exit status; unless interrupted, the step may finish first."""
        finished = _wait(self._process, 0.0 if interrupted else DRAIN_SECONDS)
        self._tree.end(0.0 if finished else GRACE_SECONDS)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # an answer that came too late is still in its buffer
                self._process.stdin.close()
        return self._process.wait()

    def drain(self) -> Iterator[str]:
        """Lines that are left once the processes are gone."""
        deadline = time.monotonic() + DRAIN_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._queue.get(timeout=left)
            except queue.Empty:
                return
            if line is None:
                return
            yield line

    def _read(self) -> None:
        splitter = LineSplitter()
        assert self._process.stdout is not None
        try:
            while block := self._process.stdout.read1(65536):  # type: ignore[attr-defined]
                for line in splitter.feed(block):
                    self._queue.put(line)
        except (OSError, ValueError):
            pass
        for line in splitter.end():
            self._queue.put(line)
        self._queue.put(None)
        self._process.stdout.close()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        return False


def _timeout_error(name: str, files: _StepFiles, tail: tuple[str, ...], seconds: float) -> StepError:
    return StepError(
        f"step {name} was ended after {seconds / 60:g} minutes",
        log_path=str(files.log),
        tail=tail,
        remedy=f"raise limits.step_timeout_minutes, or see where it hangs in {files.log}",
    )


def _result(name: str, status: int, files: _StepFiles, output: _Output) -> Any:
    """The step's result, or the error that says why there is none."""
    log_path, tail = str(files.log), output.tail
    try:
        outcome = StepOutcome.model_validate_json(files.result.read_bytes())
    except (OSError, ValidationError):
        last = f"; its last line: {tail[-1].strip()}" if tail else ""
        raise StepError(
            f"step {name} {describe_status(status)} without a result{last}", log_path=log_path, tail=tail
        ) from None
    if outcome.failure is not None:
        failure = outcome.failure
        message = output.redact(failure.message)
        raise StepError(
            message,
            log_path=log_path,
            tail=tail,
            error_type=failure.error_type,
            details=failure.details,
        )
    if status != 0:
        raise StepError(f"step {name} {describe_status(status)}", log_path=log_path, tail=tail)
    return RESULT_TYPES[name].model_validate(outcome.result)


def describe_status(status: int) -> str:
    """`ended with exit code 1` or `was killed by SIGKILL (out of memory?)`."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"was killed by signal {-status}"
    return f"was killed by {number.name}" + (" (out of memory?)" if number == signal.SIGKILL else "")
