"""Measures one host with all its GPUs in one go: `python -m benchmarks.host --gpus 8 --target FOLDER`.

Each part runs in processes of its own, so that nothing of one stays in memory for the next, and within its
share of `--minutes`; what one leaves of its time, those after it get:

- `topology`: GPUs, links, driver, how fast files are written; bandwidth of sums over all GPUs;
- `capture`: an 8B shape of made-up weights and a miniature of DeepSeek-V3 (rows `mla`), an engine on each GPU
  and one on all, beside plain prefill;
- `training`: the draft of an 8B shape, a rank on each GPU, beside one rank at the same global batch;
- `smollm2`: the shipped profile on all GPUs, for the target that `--target` names. Its answers and its
  capture are made while `capture` imports and loads, the rest at the end: beside measurements nothing runs.

A part that fails or runs over its time is reported with its last lines, and the others go on; the exit status
is 1 then. The same command measures any number of GPUs. `--device cpu --shape tiny` tries it without one:
processes stand for GPUs, and no figure says anything; give it time (`--minutes 15`), because a few cores load
engines slowly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.host_parts import (
    END_SECONDS,
    PARTS,
    Part,
    PartOutcome,
    PartSpec,
    figures_of,
    limit_of,
    run_part,
)
from benchmarks.host_signals import QUIET_SECONDS, forget, give, wait_for
from benchmarks.host_table import Row, format_rows, rows_of
from eagle3_core.host.gpus import visible_gpus
from eagle3_core.store.files import write_atomic
from eagle3_core.store.tree import files_below

LARGE_BYTES = 1 << 22


def chosen_devices(device: str, count: int, visible: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that are measured: the first of those that are visible; none on the CPU.

    Args:
        device: `cpu` or `cuda`.
        count: GPUs wanted.
        visible: names of those that there are.

    Raises:
        ValueError: there are fewer.
    """
    if device == "cpu":
        return ()
    if count > len(visible):
        raise ValueError(f"--gpus {count}, but {len(visible)} are visible")
    return tuple(visible[:count])


class HostRun:
    """The chosen parts within their limits; the document is written anew after each.

    Args:
        options: of the command line.
        folder: of the parts' folders.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._started = time.monotonic()
        self._deadline = self._started + 60 * options.minutes - END_SECONDS
        self._waiting = [part for part in PARTS if part.name in options.parts]
        self._outcomes: dict[str, PartOutcome] = {}
        self._early: dict[str, PartSpec] = {}
        self._stopped, self._is_in_the_way = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def run(self) -> list[PartOutcome]:
        """Run them all; those that begin early meanwhile, to be over last."""
        forget(self._folder)
        early = [part for part in self._waiting if part.begins_early]
        with ThreadPoolExecutor(max(1, len(early))) as pool:
            try:
                begun = [pool.submit(self._run_early, part, self._spec(part, self._left())) for part in early]
                if not early:
                    give("early-stages-over", self._folder)
                for part in [each for each in self._waiting if not each.begins_early]:
                    self._run_in_turn(part)
                give("other-parts-over", self._folder)
                for each in begun:
                    each.result()
            except BaseException:
                self._stopped.set()
                raise
        return self.outcomes()

    def outcomes(self) -> list[PartOutcome]:
        """Of all parts that have ended, in order, and what the others have left so far."""
        seconds = time.monotonic() - self._started
        running = {
            name: PartOutcome(
                name=name,
                state="running",
                seconds=seconds,
                limit_seconds=spec.seconds,
                figures=figures_of(spec),
            )
            for name, spec in list(self._early.items())
        }
        found = running | self._outcomes
        return [found[part.name] for part in PARTS if part.name in found]

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _run_in_turn(self, part: Part) -> None:
        if part.is_alone and not wait_for("early-stages-over", self._folder, QUIET_SECONDS):
            self._is_in_the_way.set()
            wait_for("early-stages-over", self._folder, END_SECONDS)
        limit = limit_of(part.name, self._waiting, self._left())
        self._run(part, self._spec(part, limit), self._check)
        self._waiting.remove(part)

    def _run_early(self, part: Part, spec: PartSpec) -> None:
        self._early[part.name] = spec
        try:
            self._run(part, spec, self._check_early)
        finally:
            give("early-stages-over", self._folder)

    def _run(self, part: Part, spec: PartSpec, check: Callable[[], None]) -> None:
        show(f"{part.name}: at most {spec.seconds:.0f} s")
        outcome = run_part(part, spec, lambda line: show(f"  {part.name}: {line}"), check)
        show(f"{part.name}: {outcome_line(outcome)}")
        remove_large(Path(spec.folder))
        with self._lock:
            self._outcomes[part.name] = outcome
            self._write()

    def _write(self) -> None:
        if self._options.json:
            document = document_of(self._options, self.outcomes(), time.monotonic() - self._started)
            write_atomic(self._options.json, json.dumps(document, indent=1))

    def _check(self) -> None:
        if self._stopped.is_set():
            raise InterruptedError("the benchmark is being ended")

    def _check_early(self) -> None:
        self._check()
        if self._is_in_the_way.is_set():
            raise TimeoutError("its early stages were not over when a part had to be alone")

    def _spec(self, part: Part, seconds: float) -> PartSpec:
        options = self._options
        return PartSpec(
            name=part.name,
            gpus=options.gpus,
            device=options.device,
            shape=options.shape,
            target=str(options.target.absolute()) if options.target else None,
            folder=str(self._folder / part.name),
            devices=options.devices,
            seconds=seconds,
        )


def show(text: str) -> None:
    """Print lines at once and undivided: parts may run side by side."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def outcome_line(outcome: PartOutcome) -> str:
    """How a part went, in a line, and its last lines where it went wrong."""
    reason = f", {outcome.reason}" if outcome.reason else ""
    line = f"{outcome.state} after {outcome.seconds:.0f} s{reason}"
    return "\n    ".join([line, *outcome.last_lines])


def remove_large(folder: Path) -> None:
    """Remove a part's large files: the next part may need their space, and logs are small."""
    for path in files_below(folder):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > LARGE_BYTES:
                path.unlink()


def table_of(options: argparse.Namespace, outcomes: Sequence[PartOutcome]) -> list[Row]:
    """The rows of all parts."""
    return [row for outcome in outcomes for row in rows_of(outcome, options.device == "cuda")]


def document_of(
    options: argparse.Namespace, outcomes: Sequence[PartOutcome], seconds: float
) -> dict[str, Any]:
    """Everything measured, as JSON-able values."""
    return {
        "gpus": options.gpus,
        "device": options.device,
        "shape": options.shape,
        "minutes": options.minutes,
        "seconds": seconds,
        "parts": [outcome.model_dump(mode="json") for outcome in outcomes],
        "table": [asdict(row) | {"verdict": row.verdict} for row in table_of(options, outcomes)],
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line, by default of this process's."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, required=True, help="GPUs to measure, or processes on the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--target", type=Path, help="folder of SmolLM2-135M-Instruct, for `smollm2`")
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which all has ended")
    parser.add_argument(
        "--folder", type=Path, help="for targets, shards and logs, on a fast disk or in memory; logs are kept"
    )
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args(arguments)
    if options.gpus < 1:
        parser.error("--gpus: at least 1")
    try:
        visible = visible_gpus() if options.device == "cuda" else ()
        options.devices = chosen_devices(options.device, options.gpus, visible)
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> int:
    """Measure and print a table; returns the exit status."""
    options = parse()
    started = time.monotonic()
    folder = Path(options.folder or tempfile.mkdtemp(prefix="eagle3-host-")).absolute()
    try:
        outcomes = HostRun(options, folder).run()
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    if rows := table_of(options, outcomes):
        print(f"\n{format_rows(rows)}\n")
    for outcome in outcomes:
        print(f"{outcome.name}: {outcome.state} after {outcome.seconds:.0f} s {outcome.reason}".rstrip())
    print(f"{time.monotonic() - started:.0f} s in all")
    return 0 if all(outcome.is_sound for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
