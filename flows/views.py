"""What the command line prints about plans, runs and artifacts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import STAGES, RunConfig, Stage, resolve_path
from eagle3_core.estimate.run import ArtifactEstimate, RunEstimate, check_space, estimate_run
from eagle3_core.estimate.space import FileSystemEstimate
from eagle3_core.host.run_folder import RunFolder, RunRecord, find_run, list_runs
from eagle3_core.planning import plan_run
from eagle3_core.preflight import check_settings
from eagle3_core.report.figures import format_bytes
from eagle3_core.report.summary import RunSummary, summarise
from eagle3_core.store.open import open_store
from flows.recovery import settle_before_looking

STATE_STYLE = {
    "completed": "green",
    "failed": "red",
    "crashed": "red",
    "cancelled": "yellow",
    "running": "cyan",
    "paused": "yellow",
}


def show_plan(config: RunConfig, stages: Sequence[Stage] | None, as_json: bool) -> None:
    """Print what a run would make; an error if its settings or its bytes do not fit."""
    check_settings(config)
    estimate = estimate_run(plan_run(config), stages or STAGES)
    if as_json:
        _print_json(estimate.model_dump(mode="json"))
    else:
        _print_plan(estimate, config)
    if config.limits.check_disk:
        check_space(estimate)


def show_run(workspace: str, name: str, as_json: bool) -> None:
    """Print a run's stages and figures."""
    run = find_run(resolve_path(workspace), name)
    summary = summarise(run.path, open_store(run.config()))
    if as_json:
        _print_json(summary.model_dump(mode="json"))
        return
    console = Console()
    console.print(_stage_table(run.record()))
    for line in summary_lines(run, summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_runs(workspace: str) -> None:
    """Print a line for each run; those that were killed are told to Prefect first."""
    settle_before_looking(resolve_path(workspace))
    console = Console()
    folders = list_runs(resolve_path(workspace))
    if not folders:
        console.print(f"no runs in {resolve_path(workspace) / 'runs'}", markup=False, highlight=False)
    for folder in folders:
        record = folder.record()
        console.print(
            f"{record.run_id}  [{STATE_STYLE[record.state]}]{record.state}[/]",
            highlight=False,
            soft_wrap=True,
        )


def summary_lines(run: RunFolder, summary: RunSummary | None = None) -> Iterator[str]:
    """The result first, then where it lies."""
    record = run.record()
    found = summary or summarise(run.path, open_store(run.config()))
    kind = "rehearsal" if found.is_rehearsal else "run"
    yield f"{kind} {record.run_id} {record.state}" + (f": {record.message}" if record.message else "")
    if found.benchmark is not None:
        bench = found.benchmark
        positions = ", ".join(f"{rate:.3f}" for rate in bench.per_position)
        yield (
            f"acceptance length {bench.acceptance_length:.3f} (K={bench.num_speculative_tokens}, "
            f"{bench.num_prompts} held-out prompts, {bench.engine}); accepted by position: {positions}"
        )
        yield f"outputs with and without the draft: {bench.lossless}"
        if bench.speed_ratio is not None:
            yield f"speed with the draft, one sequence at a time: {bench.speed_ratio:.2f} x"
    export = next((a for a in found.artifacts if a.ref.kind == "export"), None)
    if export is not None:
        config = run.config()
        yield from (f"draft for {one}: {_place(config, export.ref, one)}" for one in config.export.engines)
    yield from _written(run)


def failure_lines(run: RunFolder) -> Iterator[str]:
    """Where the log of each stage that failed lies, and the report."""
    failed = [stage for stage in run.record().stages if stage.state == "failed"]
    yield from (f"log of {stage.stage}: {run.path / stage.log}" for stage in failed if stage.log)
    yield from _written(run)


def _written(run: RunFolder) -> Iterator[str]:
    for name in ("summary.json", "report.html"):
        if (run.path / name).is_file():
            yield f"{name.partition('.')[0]}: {run.path / name}"


def _place(config: RunConfig, export: ArtifactRef, engine: str) -> str:
    """Where an exported draft lies: its folder, or its place in a bucket while no stage has fetched it."""
    store = open_store(config)
    folder = store.folder(export) / engine
    return str(folder) if folder.is_dir() else f"{store.place}/{export}/{engine}"


def _print_plan(estimate: RunEstimate, config: RunConfig) -> None:
    console = Console()
    load = estimate.workload
    counted = "counted in the dataset" if load.is_exact else "estimated from the prompts"
    console.print(
        f"{config.name}: {load.num_samples:,} samples, {load.num_tokens:,} tokens ({counted}); "
        f"auxiliary ids {estimate.aux_layer_ids}, final state {estimate.final_layer_id}",
        highlight=False,
        soft_wrap=True,
    )
    wanted = config.benchmark.num_prompts
    if "benchmark" in estimate.minutes and load.num_benchmark_prompts(wanted) < wanted:
        console.print(
            f"benchmark.num_prompts is {wanted:,}, but only {load.num_heldout:,} are held out: "
            "the benchmark decodes those",
            highlight=False,
            soft_wrap=True,
        )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "artifact", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("size", "to write", "min"):
        table.add_column(name, justify="right", no_wrap=True)
    shown: set[Stage] = set()
    for artifact in estimate.artifacts:
        first = artifact.stage not in shown
        shown.add(artifact.stage)
        table.add_row(*_plan_row(artifact, estimate, first))
    console.print(table)
    for system in estimate.file_systems:
        _print_file_system(console, system)
    if estimate.options:
        is_enough = any(not option.lacking_bytes for option in estimate.options)
        console.print("\nwhat would help:" if is_enough else "\nwhat would help, but is not enough:")
    for option in estimate.options:
        enough = "fits" if not option.lacking_bytes else f"still lacks {format_bytes(option.lacking_bytes)}"
        console.print(
            f"  {option.change}: needs {format_bytes(option.need_bytes)}, {enough}",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip
    console.print(
        f"\nto write {format_bytes(estimate.new_bytes)}; roughly {estimate.total_minutes:.0f} minutes",
        highlight=False,
        soft_wrap=True,
    )


def _print_file_system(console: Console, system: FileSystemEstimate) -> None:
    """What the run needs of one file system, of what, and who else has reserved space there."""
    verdict = "[green]fits[/]" if system.fits else f"[red]lacks {format_bytes(system.lacking_bytes)}[/]"
    console.print(
        f"\n[bold]{escape(system.mount)}[/] {verdict}: at most {format_bytes(system.need_bytes)} at once, "
        f"{format_bytes(system.free_bytes)} free, of which {format_bytes(system.reserve_bytes)} stay free",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=True)
    table.add_column("  stage", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("stays", justify="right", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    for item in sorted(system.items, key=lambda item: STAGES.index(item.stage)):
        stays = format_bytes(item.bytes) if item.bytes else "-"
        table.add_row(f"  {item.stage}", escape(item.what), stays, format_bytes(item.peak_bytes))
    console.print(table)
    for run_id, size in system.reserved.items():
        text = f"  the run {escape(run_id)} has reserved {format_bytes(size)} of what is free"
        console.print(text, highlight=False, soft_wrap=True)


def _plan_row(artifact: ArtifactEstimate, estimate: RunEstimate, first: bool) -> list[str]:
    minutes = estimate.minutes.get(artifact.stage)
    return [
        artifact.stage if first else "",
        str(artifact.ref) if artifact.ref else f"{artifact.kind}/(after prepare)",
        artifact.state,
        format_bytes(artifact.bytes),
        format_bytes(artifact.new_bytes) if artifact.new_bytes else "-",
        f"{minutes:.1f}" if first and minutes else "",
    ]


def _stage_table(record: RunRecord) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for stage in record.stages:
        style = STATE_STYLE.get(stage.state, "dim")
        seconds = "" if stage.seconds is None else f"{stage.seconds:.1f}"
        table.add_row(stage.stage, f"[{style}]{stage.state}[/]", seconds, escape(stage.message))
    return table


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=1))
