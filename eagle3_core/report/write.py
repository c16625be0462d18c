"""Writes a run's `summary.json` and `report.html`."""

from __future__ import annotations

from pathlib import Path

from eagle3_core.report.summary import SUMMARY_FILE, RunSummary, summarise
from eagle3_core.store.files import write_atomic
from eagle3_core.store.local import LocalStore


def write_report(run_folder: Path, store: LocalStore) -> RunSummary:
    """Summarise a run from its folder (`config.yaml`, `stages.json`) and the store's manifests.

    May be called at any moment of a run, also after a failed stage: figures that are not there yet are null.

    Raises:
        StoreError: the run folder has no readable configuration or stages.
    """
    summary = summarise(run_folder, store)
    write_atomic(run_folder / SUMMARY_FILE, summary.model_dump_json(indent=1))
    return summary
