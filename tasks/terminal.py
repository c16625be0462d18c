"""What the person at the terminal sees: a live bar on a terminal, plain lines elsewhere.

A worker's flow run has no terminal; there every call does nothing, and Prefect's own console log speaks.
"""

from __future__ import annotations

import logging
import os
import re
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from eagle3_core.config import Stage
from eagle3_core.contracts import ProgressEvent
from eagle3_core.host.run_folder import RunFolder
from eagle3_core.notices import is_notice
from eagle3_core.stage_run import StageOutcome

PLAIN_PROGRESS_SECONDS = 15.0
OWN_LOGGER = "eagle3_core"
OWN_PREFIX = re.compile(rf"^(\[rank \d+\] )?([\d-]+ [\d:,]+ [A-Z]|[A-Z]+) {OWN_LOGGER}[\w.]*: ")


class Terminal:
    """Shows nothing."""

    def run_started(self, run: RunFolder) -> None:
        """A run begins."""

    def stage_started(self, stage: Stage) -> None:
        """A stage begins."""

    def line(self, stage: Stage, text: str, level: int) -> None:
        """A log line."""

    def progress(self, stage: Stage, event: ProgressEvent) -> None:
        """A progress event."""

    def stage_done(self, outcome: StageOutcome) -> None:
        """A stage ended well."""

    def close(self) -> None:
        """Nothing more is shown."""


class RichTerminal(Terminal):
    """A bar for the running stage, one line for each finished one, warnings as they come.

    Args:
        console: where.
        has_own_server: the run's Prefect server is its own, which nobody else knows the address of.
    """

    def __init__(self, console: Console, has_own_server: bool = False) -> None:
        self._console = console
        self._has_own_server = has_own_server
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._last_plain = 0.0
        self._is_shown = False
        self._unshown = ""
        self._last_line = ""
        self.run: RunFolder | None = None
        if console.is_terminal:
            self._progress.start()

    def run_started(self, run: RunFolder) -> None:
        self.run = run
        if self._has_own_server:
            elsewhere = f"`kill {os.getpid()}` from elsewhere; Prefect's page and command do not reach it"
        else:
            elsewhere = f"`prefect flow-run cancel {run.record().flow_run_id}`"
        for line in (
            f"run {run.run_id}, logs in {run.path}",
            f"Ctrl-C cancels it, and so does {elsewhere}",
        ):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stage_started(self, stage: Stage) -> None:
        self._last_line = ""
        if self._console.is_terminal:
            self._clear()
            self._task = self._progress.add_task(stage, total=None, text="")
        else:
            self._console.print(f"{stage} ...", highlight=False)
        self._last_plain, self._is_shown, self._unshown = time.monotonic(), False, ""

    def line(self, stage: Stage, text: str, level: int) -> None:
        """Errors, and warnings and notices of our own; an engine's warnings are in the log.

        A limit is checked by the step and again by the run, so the same words can come twice: once is enough.
        """
        is_shown = level >= logging.ERROR or (level >= logging.WARNING and OWN_LOGGER in text)
        if is_shown or is_notice(text):
            text = OWN_PREFIX.sub(r"\1", text)
            if text == self._last_line:
                return
            self._last_line = text
            style = "red" if level >= logging.ERROR else "yellow" if is_shown else None
            self._console.print(f"  {text}", style=style, markup=False, highlight=False, soft_wrap=True)

    def progress(self, stage: Stage, event: ProgressEvent) -> None:
        from tasks.reporting import describe

        text = describe(event)
        if self._task is not None:
            self._progress.update(self._task, completed=event.done, total=event.total, text=text)
        elif time.monotonic() - self._last_plain > PLAIN_PROGRESS_SECONDS:
            self._last_plain, self._is_shown = time.monotonic(), True
            self._plain_progress(stage, text)
        else:
            self._unshown = text

    def stage_done(self, outcome: StageOutcome) -> None:
        """The stage's line; where progress was shown, its last figures come before."""
        self._clear()
        if self._is_shown and self._unshown:
            self._plain_progress(outcome.stage, self._unshown)
        mark = ("=", "dim") if outcome.reused else ("✓", "green")
        text = f" {outcome.stage:<10}{outcome.seconds:7.1f} s  {outcome.message}"
        self._console.print(Text.assemble(mark, text), soft_wrap=True)

    def close(self) -> None:
        self._clear()
        if self._console.is_terminal:
            self._progress.stop()

    def _plain_progress(self, stage: Stage, text: str) -> None:
        self._unshown = ""
        self._console.print(f"  {stage}: {text}", markup=False, highlight=False, soft_wrap=True)

    def _clear(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


_terminal: Terminal = Terminal()


def terminal() -> Terminal:
    """The terminal of this process."""
    return _terminal


def use_terminal(new: Terminal) -> None:
    """Set the terminal of this process; the command line does."""
    global _terminal
    _terminal = new
