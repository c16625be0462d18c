"""The step boundary: `python -m eagle3_core.step NAME SPEC RESULT` runs one step in an engine environment.

A step reads a typed spec, prints log lines to standard output, reports progress as lines that start with
`PROGRESS_PREFIX` followed by JSON, and leaves a `StepOutcome` in the result file. The caller holds the write
end of the step's standard input open: when it closes, the caller is gone and the step ends itself and all its
descendants, so nothing is left that holds a GPU or a folder.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import psutil

from eagle3_core.contracts import (
    RESULT_TYPES,
    SPEC_TYPES,
    ProgressEvent,
    StepFailure,
    StepOutcome,
    StepSpec,
)
from eagle3_core.errors import EXIT_BUG, EXIT_OK, EXIT_PARENT_GONE, Eagle3Error
from eagle3_core.host.redaction import Redactor
from eagle3_core.store.disk import DiskGuard, as_host_error, guarding
from eagle3_core.store.files import write_atomic

STEPS = {
    "engine_info": "eagle3_core.host.engine_info",
    "fetch_target": "eagle3_core.target.fetch",
    "prepare": "eagle3_core.data.prepare",
    "extract": "eagle3_core.capture.extract",
    "verify": "eagle3_core.capture.verify",
    "train": "eagle3_core.training.train",
    "export": "eagle3_core.serving.export",
    "benchmark": "eagle3_core.serving.benchmark",
    "probe": "eagle3_core.capture.probe",
    "import_capture": "eagle3_core.capture.import_folder",
    "export_capture": "eagle3_core.capture.export_folder",
}
"""Step name to the module whose `run(spec, progress)` does the work."""

PROGRESS_PREFIX = "@eagle3-progress "
MIN_PROGRESS_INTERVAL_SECONDS = 0.5
LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class Progress:
    """Reports progress of a step; rate-limited, so it may be called in tight loops."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._last = 0.0
        self._paused = ""
        self._event = ProgressEvent(step=step, done=0, total=None, unit="")

    def __call__(
        self,
        done: float,
        total: float | None,
        unit: str,
        message: str = "",
        *,
        force: bool = False,
        **metrics: float,
    ) -> None:
        """Report `done` of `total` units; `metrics` are current figures such as loss."""
        now = time.monotonic()
        if not force and done != total and now - self._last < MIN_PROGRESS_INTERVAL_SECONDS:
            return
        self._last = now
        self._event = ProgressEvent(
            step=self._step, done=done, total=total, unit=unit, message=message, metrics=metrics
        )
        self._tell()

    def pause(self, reason: str | None) -> None:
        """Say that work waits, and why; with None that it goes on."""
        changed, self._paused = (reason or "") != self._paused, reason or ""
        if changed:
            self._tell()

    def _tell(self) -> None:
        pause = {"is_paused": True, "message": self._paused} if self._paused else {}
        event = self._event.model_copy(update=pause)
        os.write(1, f"{PROGRESS_PREFIX}{event.model_dump_json()}\n".encode())


def main(arguments: list[str] | None = None) -> int:
    """Run the step that the command line names; returns the exit code."""
    name, spec_path, result_path = arguments if arguments is not None else sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stdout, force=True)
    if not sys.stdin.isatty():
        threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    started = time.monotonic()
    guard = contextlib.ExitStack()
    try:
        spec, progress = SPEC_TYPES[name].model_validate_json(Path(spec_path).read_text()), Progress(name)
        if isinstance(spec, StepSpec):
            guard.enter_context(guarding(DiskGuard(spec.config.limits, spec.run_id, progress.pause)))
        result = _run(name, spec, progress)
        outcome = StepOutcome(status="ok", result=result, seconds=time.monotonic() - started)
    except Exception as error:
        outcome = StepOutcome(status="failed", failure=failure_of(error), seconds=time.monotonic() - started)
    outcome = _leave(Path(result_path), outcome)
    guard.close()
    if outcome.failure is None:
        return EXIT_OK
    print(f"step {name} failed: {outcome.failure.message}", flush=True)
    if not outcome.failure.is_user_error:
        print(outcome.failure.traceback, flush=True)
        return EXIT_BUG
    return Eagle3Error.exit_code


def run_step(name: str, spec_json: str) -> dict[str, Any]:
    """Run a step in this process and return its result as JSON-able values."""
    return _run(name, SPEC_TYPES[name].model_validate_json(spec_json), Progress(name))


def _run(name: str, spec: Any, progress: Progress) -> dict[str, Any]:
    result = importlib.import_module(STEPS[name]).run(spec, progress)
    return RESULT_TYPES[name].model_validate(result).model_dump(mode="json")


def _leave(path: Path, outcome: StepOutcome) -> StepOutcome:
    """Write the outcome; where even that cannot be done, the step has failed and only its output says why."""
    try:
        write_atomic(path, outcome.model_dump_json(indent=1))
    except (OSError, Eagle3Error) as error:
        failure = outcome.failure or failure_of(error)
        return StepOutcome(status="failed", failure=failure, seconds=outcome.seconds)
    return outcome


def failure_of(error: Exception) -> StepFailure:
    """How an error is told to whoever started this process; secrets of its environment are left out."""
    redact = Redactor(os.environ)
    if isinstance(error, OSError):
        error = as_host_error(error) or error
    known = isinstance(error, Eagle3Error)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return StepFailure(
        error_type=type(error).__name__,
        message=" ".join(redact(message).split())[:2000],
        traceback=redact(traceback.format_exc()),
        is_user_error=known,
        details=redact.all_of(error.details) if isinstance(error, Eagle3Error) else {},
    )


def end_with_parent() -> None:
    """Wait until standard input closes, then end every descendant and this process."""
    while os.read(0, 4096):
        continue
    end_with_descendants()


def end_with_descendants() -> None:
    """End every descendant and this process, at once; this process also where the others cannot be listed."""
    try:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
    finally:
        os._exit(EXIT_PARENT_GONE)


def end_process(code: int) -> NoReturn:
    """End this process without taking the interpreter down, after the work is done and saved.

    Engines, torch and its collectives leave threads and atexit hooks that can hang then, or abort: gloo's
    threads may still let go of tensors and ask for Python's lock.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
