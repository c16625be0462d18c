"""Writes a run's `summary.json` and `report.html`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from eagle3_core.errors import HostError, StoreError
from eagle3_core.host.run_folder import RunFolder, StageRecord
from eagle3_core.report.curves import TrainingCurves, read_curves
from eagle3_core.report.html import render_html
from eagle3_core.report.model import RunSummary
from eagle3_core.report.summary import summarise
from eagle3_core.store.files import write_atomic
from eagle3_core.store.local import LocalStore

SUMMARY_NAME = "summary.json"
REPORT_NAME = "report.html"


def write_report(run_folder: Path, store: LocalStore) -> RunSummary:
    """Write both files of a run; the summary comes last, so where it is, the report is too.

    May be called at any moment of a run, also after a failed stage.

    Raises:
        HostError: the run folder has no readable configuration or record, or cannot be written.
    """
    summary = summarise(run_folder, store)
    curves, problem = _curves(summary, store)
    summary = summary.model_copy(update={"problems": (*summary.problems, *problem)})
    stages = tuple(_finished_report(stage) for stage in summary.stages)
    summary = summary.model_copy(update={"stages": stages})
    try:
        write_atomic(run_folder / REPORT_NAME, render_html(summary, RunFolder(run_folder).config(), curves))
        write_atomic(run_folder / SUMMARY_NAME, summary.model_dump_json(indent=1))
    except OSError as error:
        raise HostError(f"cannot write the report into {run_folder} ({error})") from error
    return summary


def _curves(summary: RunSummary, store: LocalStore) -> tuple[TrainingCurves | None, tuple[str, ...]]:
    """The curves of the run's training, and what stood in the way of reading them."""
    ref = next((artifact.ref for artifact in summary.artifacts if artifact.ref.kind == "checkpoint"), None)
    if summary.training is None or ref is None:
        return None, ()
    try:
        return read_curves(store, ref), ()
    except StoreError as error:
        return None, (str(error),)


def _finished_report(stage: StageRecord) -> StageRecord:
    """The report's own stage as it will be when the files that are being written can be read."""
    if stage.stage != "report" or stage.state != "running" or stage.started_at is None:
        return stage
    seconds = (datetime.now(UTC) - stage.started_at).total_seconds()
    return stage.model_copy(update={"state": "completed", "seconds": round(seconds, 3)})
