"""Probes of all known architectures, each in a process of its own; needs an engine environment and no more.

An engine that dies or hangs takes one architecture with it: that is a result too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3_core.capture.probe_plan import (
    PROBE_VERSION,
    architecture_run,
    known_architecture,
    known_architectures,
    probe_dtype,
    tensor_parallel_size,
)
from eagle3_core.capture.probe_record import ERROR_LINE, ProbeRecord, result_line, with_cause, write_record
from eagle3_core.config import RunConfig
from eagle3_core.contracts import ProbeResult, ProbeSpec
from eagle3_core.errors import EXIT_OK, EXIT_STEP_FAILED, EXIT_USER_ERROR, Eagle3Error, StepError
from eagle3_core.host.engine_environment import capture_engine_config
from eagle3_core.host.engine_info import EngineVersions, capture_versions
from eagle3_core.host.process import run_step

TIMEOUT_SECONDS = {"cpu": 240.0, "cuda": 300.0}
"""For each architecture, by device: a CPU may have other work, and a fresh machine reads an engine's CUDA
build from a cold disk, twice."""
OnResult = Callable[[str, ProbeResult], None]


def probe_all(
    config: RunConfig,
    names: Sequence[str],
    folder: Path,
    timeout_seconds: float | None = None,
    on_result: OnResult | None = None,
    record_path: Path | None = None,
) -> ProbeRecord:
    """Probe architectures one after the other and collect what was found.

    Never two at once: an engine misjudges a GPU's memory when another one on it ends.

    Args:
        config: engine and device.
        names: of known architectures.
        folder: for logs and scratch files.
        timeout_seconds: of each; by default as long as the device needs.
        on_result: called with each as it is there.
        record_path: file of the record, which is written anew with each result.

    Raises:
        HostError: the engine environment does not run.
    """
    versions = capture_versions(config)
    limit = timeout_seconds or TIMEOUT_SECONDS[config.engine.device]
    results: dict[str, ProbeResult] = {}
    for name in names:
        results[name] = probe_one(config, versions, known_architecture(name), folder / name, limit)
        record = _record(config, versions, results)
        if record_path is not None and (record.device != "cuda" or len(results) == len(names)):
            write_record(record_path, record)
        if on_result is not None:
            on_result(name, results[name])
    return _record(config, versions, results)


def _record(config: RunConfig, versions: EngineVersions, results: Mapping[str, ProbeResult]) -> ProbeRecord:
    """What was found so far; a process that ended without an answer does not know the GPU's name."""
    named = [one.device for one in results.values() if one.device != config.engine.device]
    return ProbeRecord(
        probe_version=PROBE_VERSION,
        engine=config.capture.engine,
        engine_version=versions.capture_engine(config),
        device=named[0] if named else config.engine.device,
        attention_backend=config.capture.sglang_attention_backend,
        python=versions.python,
        packages=versions.packages,
        made_at=_now(),
        results=dict(sorted(results.items())),
    )


def probe_one(
    config: RunConfig,
    versions: EngineVersions,
    target_config: dict[str, Any],
    folder: Path,
    timeout_seconds: float,
) -> ProbeResult:
    """Probe one architecture; a process that dies or hangs becomes the result `failed`."""
    started = time.monotonic()
    spec = ProbeSpec(config=config, target_config=target_config, folder=str(folder / "scratch"))
    errors: list[str] = []

    def note(line: str) -> None:
        if ERROR_LINE.match(line):
            errors.append(line)

    try:
        result = run_step(
            "probe",
            spec,
            engine=capture_engine_config(config),
            folder=folder,
            on_line=note,
            timeout_seconds=timeout_seconds,
        )
        return with_cause(result, errors)
    except StepError as error:
        return ProbeResult(
            outcome="failed",
            reason=error.found,
            engine=config.capture.engine,
            packages=versions.packages,
            device=config.engine.device,
            dtype=probe_dtype(config),
            tensor_parallel_size=tensor_parallel_size(config),
            architecture=(target_config.get("architectures") or ["unknown"])[0],
            layers=[],
            num_requests=0,
            seconds=round(time.monotonic() - started, 1),
            made_at=_now(),
        )


def main(arguments: list[str] | None = None) -> int:
    """The command line of `python -m eagle3_core.capture.probe`; returns the exit code."""
    options = _parser().parse_args(arguments)
    names = list(known_architectures()) if options.all else options.architecture
    try:
        with tempfile.TemporaryDirectory(prefix="eagle3-probe-") as scratch:
            folder = options.logs or Path(scratch)
            config = architecture_run(options.engine, options.device)
            chosen = {"sglang_attention_backend": options.attention_backend}
            config = config.model_copy(update={"capture": config.capture.model_copy(update=chosen)})
            record = probe_all(
                config,
                names,
                folder,
                options.timeout,
                lambda name, result: print(f"{name:12} {result_line(result)}", flush=True),
                options.record,
            )
    except Eagle3Error as error:
        print(f"probe: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_OK if record.is_right else EXIT_STEP_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eagle3_core.capture.probe",
        description="Probe architectures with the engine of this environment.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="every known architecture")
    which.add_argument("--architecture", action="append", choices=list(known_architectures()))
    parser.add_argument("--engine", choices=["vllm", "sglang", "reference"], required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--attention-backend", help="SGLang's, e.g. triton; by default it chooses")
    parser.add_argument("--record", type=Path, help="write the results as JSON")
    parser.add_argument("--logs", type=Path, help="keep each process's log in this folder")
    parser.add_argument("--timeout", type=float, help="seconds for each architecture")
    return parser


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
