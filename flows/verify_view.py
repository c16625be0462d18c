"""The command `eagle3 verify`: its progress, its table and its exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from eagle3_core.artifacts import ArtifactRef, FileEntry
from eagle3_core.checking import ArtifactCheck, check_files, check_states, making_config
from eagle3_core.config import RunConfig
from eagle3_core.contracts import ProgressEvent
from eagle3_core.errors import EXIT_OK, EXIT_USER_ERROR
from eagle3_core.lineage import find_artifact
from eagle3_core.report.figures import format_bytes, format_number_of
from eagle3_core.store.local import LocalStore


def verify(
    store: LocalStore,
    name: str,
    config: RunConfig | None,
    workspace: Path,
    *,
    deep: bool,
    files_only: bool,
    as_json: bool,
) -> int:
    """Check an artifact and print what is wrong, a line each; returns the exit code."""
    ref = find_artifact(store, name)
    check = _check_files(store, ref, deep)
    if ref.kind == "capture" and not files_only:
        if check.is_right:
            made_by = config or making_config(store, ref, workspace)
            with _step_progress() as on_progress:
                check = check_states(check, store, ref, made_by, deep=deep, on_progress=on_progress)
        else:
            check = check.model_copy(update={"meaning": "not checked"})
    show(check, as_json)
    return EXIT_OK if check.is_right else EXIT_USER_ERROR


def show(check: ArtifactCheck, as_json: bool) -> None:
    """Print the outcome."""
    if as_json:
        print(check.model_dump_json(indent=1))
        return
    console = Console()
    if check.problems:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("where", overflow="fold")
        table.add_column("what is wrong", overflow="fold")
        for problem in check.problems:
            table.add_row(escape(problem.where), escape(problem.problem))
        console.print(table)
    for line in _summary(check):
        console.print(escape(line), highlight=False, soft_wrap=True)


def _summary(check: ArtifactCheck) -> Iterator[str]:
    size = f"{format_number_of(check.num_files, 'file')}, {format_bytes(check.bytes)}"
    verdict = "right" if check.is_right else format_number_of(len(check.problems), "problem")
    yield f"{check.artifact} in {check.store}: {verdict}; {size} checked in {check.seconds:.1f} s"
    if check.meaning == "not checked":
        yield "what the states mean was not checked: the stage extract must make these files anew first"
    if check.meaning == "not asked":
        yield "what the states mean was not checked"
    if check.meaning == "wrong":
        yield "what is condemned is made anew by the next extract"
    if check.findings.get("num_rows_checked"):
        found = check.findings
        yield (
            f"next tokens of {found['num_rows_checked']:,} rows agree to {found['agreement']:.4f}; "
            f"{len(found.get('layers', ()))} layers compared with the reference, "
            f"{len(found.get('bad_samples', ()))} samples left out of training"
        )
    if check.unnamed_files:
        yield f"{len(check.unnamed_files)} files that the manifest does not name lie beside: run cleanup"


def _check_files(store: LocalStore, ref: ArtifactRef, deep: bool) -> ArtifactCheck:
    """With a bar for a person who watches."""
    manifest = store.find(ref)
    if manifest is None or not sys.stderr.isatty():
        return check_files(store, ref, deep=deep)
    columns = (TextColumn("hashing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("hashing", total=manifest.bytes)

        def on_file(entry: FileEntry) -> None:
            progress.advance(task, entry.bytes)

        return check_files(store, ref, deep=deep, on_file=on_file)


@contextmanager
def _step_progress() -> Iterator[Any]:
    """A bar over the shards that the step has read; nothing where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("states"), BarColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("states", total=None, text="starting the engine environment")

        def on_progress(event: ProgressEvent) -> None:
            text = f"{event.done:g} {event.unit} {event.message}"
            progress.update(task, completed=event.done, total=event.total, text=text)

        yield on_progress
