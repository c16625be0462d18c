"""Carries a stage's lines, progress and outcome to Prefect and to the terminal."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import TaskRunContext
from prefect.exceptions import PrefectException

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import Stage
from eagle3_core.contracts import ProgressEvent
from eagle3_core.errors import StoreError
from eagle3_core.host.lines import guess_level
from eagle3_core.lineage import trace
from eagle3_core.notices import is_notice
from eagle3_core.pipeline import StageError
from eagle3_core.stage_run import Callbacks, StageOutcome
from eagle3_core.store.local import LocalStore
from tasks import pages
from tasks.terminal import terminal

MAX_LINES_PER_SECOND = 200
PROGRESS_SECONDS = 3.0
CANCEL_CHECK_SECONDS = 5.0
CORE_LOGGER = logging.getLogger("eagle3_core")


class RunCancelled(KeyboardInterrupt):
    """The run was cancelled through the API; ends the step like Ctrl-C does."""


class StageReporter:
    """Reports one attempt of one stage."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._logger = get_run_logger()
        self._second, self._in_second, self._left_out = 0, 0, 0
        self._artifact: UUID | None = None
        self._last_progress = 0.0
        self._last_check = -CANCEL_CHECK_SECONDS

    @property
    def callbacks(self) -> Callbacks:
        """For `run_stage`."""
        return Callbacks(self.line, self.progress, self.tick)

    def line(self, text: str) -> None:
        """Log a line of the step; a flood is thinned, counted, and complete in the step's log file."""
        second = int(time.monotonic())
        if second != self._second:
            self._tell_left_out()
            self._second, self._in_second = second, 0
        self._in_second += 1
        level = guess_level(text)
        if self._in_second > MAX_LINES_PER_SECOND and level < logging.WARNING and not is_notice(text):
            self._left_out += 1
            return
        self._logger.log(level, "%s", text)
        terminal().line(self._stage, text, level)

    def progress(self, event: ProgressEvent) -> None:
        """Show progress, and update the progress artifact every few seconds."""
        terminal().progress(self._stage, event)
        now = time.monotonic()
        is_last = event.total is not None and event.done >= event.total
        if event.total and (is_last or now - self._last_progress > PROGRESS_SECONDS):
            self._last_progress = now
            with _api_errors_logged(self._logger):
                self._publish(100.0 * min(1.0, event.done / event.total), describe(event))

    def tick(self) -> None:
        """End the stage when its run has been cancelled in the API.

        Raises:
            RunCancelled: it was.
        """
        now = time.monotonic()
        if now - self._last_check < CANCEL_CHECK_SECONDS:
            return
        self._last_check = now
        context = TaskRunContext.get()
        flow_run_id = context.task_run.flow_run_id if context else None
        if flow_run_id is None:
            return
        with _api_errors_logged(self._logger), get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
            if state is not None and state.type in (StateType.CANCELLING, StateType.CANCELLED):
                raise RunCancelled("the run was cancelled")

    def finish(self, outcome: StageOutcome, heading: str, store: LocalStore) -> None:
        """Log the outcome; publish it, its tables and the manifests of what it made.

        Keys are the same in every run, so that Prefect shows the history of each.
        """
        self._tell_left_out()
        self._logger.info("%s %s", self._stage, outcome.message)
        terminal().stage_done(outcome)
        with _api_errors_logged(self._logger):
            create_markdown_artifact(
                pages.outcome_markdown(outcome, heading),
                key=f"eagle3-{self._stage}",
                description=f"{self._stage}: {outcome.message}"[:500],
            )
            self._publish_tables(outcome)
            for ref in outcome.artifacts:
                self._publish_manifest(store, ref)

    def fail(self, error: StageError) -> None:
        """Publish the findings that an error carries; the error itself is the task's state."""
        with _api_errors_logged(self._logger):
            self._publish_tables(
                StageOutcome(stage=self._stage, message=str(error), result=dict(error.details))
            )

    def _publish_tables(self, outcome: StageOutcome) -> None:
        for page in pages.stage_tables(outcome):
            create_table_artifact(list(page.rows), key=page.key, description=page.description)

    def _publish_manifest(self, store: LocalStore, ref: ArtifactRef) -> None:
        try:
            manifest, lineage = store.read(ref), trace(store, ref)
        except StoreError as error:
            self._logger.warning("no page of %s: %s", ref, error)
            return
        create_markdown_artifact(
            pages.manifest_markdown(manifest, lineage),
            key=pages.manifest_key(manifest),
            description=f"{ref}, {manifest.bytes:,} bytes",
        )

    @contextlib.contextmanager
    def core_log(self) -> Iterator[None]:
        """Also report what `eagle3_core` logs in this process."""
        handler = _LineHandler(self)
        CORE_LOGGER.addHandler(handler)
        try:
            yield
        finally:
            CORE_LOGGER.removeHandler(handler)

    def _publish(self, percent: float, text: str) -> None:
        if self._artifact is None:
            key = f"eagle3-{self._stage}-progress"
            self._artifact = create_progress_artifact(percent, key=key, description=text)  # type: ignore[assignment]
        else:
            update_progress_artifact(self._artifact, percent, description=text)

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._logger.warning(
                "%d lines of a flood were left out; the stage's log file has them", self._left_out
            )
            self._left_out = 0


class _LineHandler(logging.Handler):
    def __init__(self, reporter: StageReporter) -> None:
        super().__init__(logging.INFO)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        self._reporter.line(f"{record.levelname} {record.name}: {record.getMessage()}")


def describe(event: ProgressEvent) -> str:
    """`640 of 1,200 steps, loss 2.31, tokens per second 33,300`."""
    total = f" of {event.total:,.0f}" if event.total else ""
    metrics = "".join(f", {_words(name)} {_figure(value)}" for name, value in event.metrics.items())
    return f"{event.done:,.0f}{total} {event.unit}{metrics}" + (f": {event.message}" if event.message else "")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@contextlib.contextmanager
def _api_errors_logged(logger: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> Iterator[None]:
    """A hiccup of the API must not end hours of work; it is logged."""
    import httpx

    try:
        yield
    except (httpx.HTTPError, PrefectException, OSError) as error:
        logger.warning("the Prefect API did not answer: %s", error)
