"""`eagle3 probe`: asks whether an engine captures what we think it captures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle3_core.capture.probe_all import probe_all
from eagle3_core.capture.probe_plan import PROBE_TIMEOUT_SECONDS, known_architectures
from eagle3_core.capture.probe_record import GOOD, MARKS, ProbeRecord, result_line
from eagle3_core.config import RunConfig, resolve_path
from eagle3_core.contracts import ProbeResult, ProbeSpec, ProgressEvent
from eagle3_core.errors import EXIT_OK, EXIT_STEP_FAILED, EXIT_USER_ERROR, TargetError
from eagle3_core.host.engine_environment import capture_engine_config
from eagle3_core.host.engine_info import capture_versions
from eagle3_core.host.process import run_step
from eagle3_core.preflight import check_devices
from eagle3_core.probing import ask, target_document
from eagle3_core.sections import TargetConfig
from eagle3_core.target.locate import is_builtin, present_target

LEGEND = (
    "error: median distance of a layer's states to transformers' own, ||a-b||/||b||; "
    "next layer: that to the nearest other layer"
)


def probe_target(config: RunConfig, target: str | None, fresh: bool, as_json: bool) -> int:
    """Probe one target, or one known architecture; returns the exit code.

    Args:
        config: of a profile, with engine and device as wanted.
        target: another target than the profile's, or the name of a known architecture.
        fresh: ask again even if the answer is known.
        as_json: print the result as JSON.
    """
    document = _document(config, target)
    if target is not None:
        config = _with_target(config, target)
    console = Console(stderr=True, highlight=False)

    def show(event: ProgressEvent) -> None:
        console.print(f"{event.done:g}/{event.total:g} {event.unit}: {event.message}")

    def run(spec: ProbeSpec) -> ProbeResult:
        return run_step(
            "probe",
            spec,
            engine=capture_engine_config(config),
            folder=_logs(config),
            on_progress=show,
            timeout_seconds=PROBE_TIMEOUT_SECONDS,
        )

    versions, log = capture_versions(config), _logs(config) / "probe.log"
    if config.engine.device == "cuda":
        check_devices(config, capture_engine_config(config))
    scratch = _logs(config) / f"probe-{os.getpid()}"
    result = ask(config, document, versions, scratch, run, fresh, log)
    if as_json:
        print(result.model_dump_json(indent=1))
    else:
        _print_result(result, versions.capture_engine(config))
        if result.outcome == "failed":
            console.print(f"log: {escape(str(log))}")
    return EXIT_OK if result.outcome == "ok" else EXIT_USER_ERROR


def probe_known(config: RunConfig, record_path: Path | None, as_json: bool) -> int:
    """Probe every known architecture; returns the exit code."""
    console = Console(stderr=True, highlight=False)

    def show(name: str, result: ProbeResult) -> None:
        console.print(f"{name}: {escape(result_line(result))}")

    logs = _logs(config) / "probes"
    record = probe_all(config, list(known_architectures()), logs, on_result=show, record_path=record_path)
    if as_json:
        print(record.model_dump_json(indent=1))
    else:
        _print_record(record)
    return EXIT_OK if record.is_right else EXIT_STEP_FAILED


def _document(config: RunConfig, target: str | None) -> dict[str, Any]:
    known = known_architectures()
    if target in known:
        return known[target]
    if target is None:
        return target_document(present_target(config))
    try:
        return target_document(present_target(_with_target(config, target)))
    except TargetError as error:
        if resolve_path(target).exists() or is_builtin(target):
            raise
        expected = f"{error.expected or 'a target'}, or an architecture: {', '.join(known)}"
        raise TargetError(error.found, expected=expected, remedy=error.remedy) from error


def _with_target(config: RunConfig, target: str) -> RunConfig:
    """The run of another target: ids and revision of the profile's mean nothing for it."""
    return config.model_copy(update={"target": TargetConfig(model=target)})


def _logs(config: RunConfig) -> Path:
    return config.workspace_path / "cache" / "logs"


def _print_result(result: ProbeResult, engine: str) -> None:
    console = Console(highlight=False)
    console.print(f"{engine}, {result.device}, {result.architecture}: {escape(result_line(result))}")
    if not result.layers:
        return
    table = Table("capture id", "nearest", "error", "p99", "next layer", box=None, pad_edge=False)
    for layer in result.layers:
        figures = (layer.median_error, layer.p99_error, layer.nearest_wrong_median)
        table.add_row(str(layer.capture_id), str(layer.nearest_id), *(f"{figure:.2g}" for figure in figures))
    console.print(table)
    console.print(LEGEND)


def _print_record(record: ProbeRecord) -> None:
    table = Table("architecture", "outcome", "", box=None, pad_edge=False)
    for name, result in record.results.items():
        colour = "green" if result.outcome in GOOD else "red"
        outcome = f"[{colour}]{MARKS[result.outcome].strip('*')}[/]"
        table.add_row(name, outcome, escape(json.dumps(result.reason)[1:-1]))
    console = Console(highlight=False)
    console.print(f"{record.engine_version}, {record.device}")
    console.print(table)
