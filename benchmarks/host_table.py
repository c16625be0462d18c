"""What the host benchmark's figures say, as rows of a table: pure functions of what the parts have left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.host_parts import PartOutcome

SCALING_WANTED = 0.9
"""Of N times one GPU, for capture with N replicas and for training on N ranks."""


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        part: that measured it.
        what: was measured.
        value: with its unit.
        ratio: to what `beside` names; None where there is nothing to compare with.
        beside: what the ratio is to.
        wanted: the least that the ratio should be; None where nothing is asked.
    """

    part: str
    what: str
    value: str
    ratio: float | None = None
    beside: str = ""
    wanted: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the ratio is what it should be; empty where nothing is asked."""
        if self.wanted is None or self.ratio is None:
            return ""
        return f"{'reached' if self.ratio >= self.wanted else 'MISSED'} (>= {self.wanted:g})"


def rows_of(outcome: PartOutcome, on_gpus: bool = True) -> list[Row]:
    """The rows of a part, as far as it came.

    Args:
        outcome: of the part.
        on_gpus: else nothing is asked of ratios: processes that share cores say nothing about scaling.
    """
    rows = _ROWS[outcome.name](outcome.name, outcome.figures)
    return [row if on_gpus else replace(row, wanted=None) for row in rows]


def format_rows(rows: Sequence[Row]) -> str:
    """The table as text."""
    cells = [
        (
            row.part,
            row.what,
            row.value,
            "" if row.ratio is None else f"{row.ratio:.3f} of {row.beside}",
            row.verdict,
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _topology(part: str, found: dict[str, Any]) -> Iterator[Row]:
    gpus = found.get("gpus", [])
    if gpus:
        names = sorted({f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB" for gpu in gpus})
        yield Row(part, "GPUs", f"{len(gpus)} x {' / '.join(names)}, driver {found['driver']}")
    for name, table in found.get("peers", {}).items() if len(gpus) > 1 else ():
        states = [state for line in table for state in line if state != "itself"]
        counted = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        yield Row(part, f"pairs of GPUs, {name}", counted)
    if "num_cpus" in found:
        memory = (
            f"{found['memory_bytes'] / 2**30:.0f} GiB memory, {found['free_disk_bytes'] / 2**30:.0f} free"
        )
        yield Row(part, "host", f"{found['num_cpus']} processors, {memory} on disk")
    one, several = found.get("write_one_bytes_per_second"), found.get("write_all_bytes_per_second")
    if one:
        yield Row(part, "one file written", _gb(one))
    if one and several:
        yield Row(part, "a file for each GPU written", _gb(several), several / one, "one file")
    sums = found.get("all_reduce", {})
    if "skipped" in sums:
        yield Row(part, "all-reduce", sums["skipped"])
    for each in sums.get("sizes", ()):
        size, spent = each["bytes"] >> 20, 1000 * each["seconds"]
        yield Row(part, f"all-reduce, {size} MiB", f"{_gb(each['bus_bytes_per_second'])} bus, {spent:.3f} ms")


def _capture(_: str, found: dict[str, Any]) -> Iterator[Row]:
    for part in ("capture", "mla"):
        yield from _replicas(part, found.get(part, {}), found.get("is_quiet", True))
        yield from _parallel(part, found.get(part, {}))


def _replicas(part: str, found: dict[str, Any], is_quiet: bool) -> Iterator[Row]:
    replicas = found.get("replicas", {})
    speeds, count = replicas.get("tokens_per_second", {}), replicas.get("engines", 1)
    plain, capture = speeds.get("plain", {}).get("1"), speeds.get("capture", {})
    if plain:
        yield Row(part, "plain prefill, 1 engine", _tokens(plain))
    one, several = capture.get("1"), capture.get(str(count))
    if plain and one:
        yield Row(part, "capture, 1 engine", _tokens(one), one / plain, "plain prefill, 1 engine")
    if plain and count > 1 and several:
        beside = f"{count} x plain prefill, 1 engine"
        yield Row(part, f"capture, {count} replicas", _tokens(several), several / (count * plain), beside)
    if one and count > 1 and several:
        # A miniature keeps no GPU busy, and beside other work no figure says anything.
        wanted = SCALING_WANTED if part == "capture" and is_quiet else None
        what = f"capture, {count} replicas{'' if is_quiet else ', beside other work'}"
        yield Row(part, what, *_scaled(several, one, count, "engine"), wanted)


def _parallel(part: str, found: dict[str, Any]) -> Iterator[Row]:
    parallel = found.get("tensor_parallel", {})
    if "skipped" in parallel:
        yield Row(part, "tensor parallel", parallel["skipped"])
        return
    speeds, size = parallel.get("tokens_per_second", {}), parallel.get("gpus_of_an_engine")
    together, captured = (speeds.get(mode, {}).get("1") for mode in ("plain", "capture"))
    plain = found.get("replicas", {}).get("tokens_per_second", {}).get("plain", {}).get("1")
    beside = f"plain prefill, tensor parallel {size}"
    if together:
        one_engine = (together / plain, "plain prefill, 1 engine") if plain else ()
        yield Row(part, beside, _tokens(together), *one_engine)
    if together and captured:
        yield Row(part, f"capture, tensor parallel {size}", _tokens(captured), captured / together, beside)


def _training(part: str, found: dict[str, Any]) -> Iterator[Row]:
    runs, steps = found.get("runs", []), found.get("steps", [])
    for run in runs:
        name, speed, count = f"step train, {_ranks(run['ranks'])}", run["tokens_per_second"], run["ranks"]
        if count == 1:
            yield Row(part, name, _tokens(speed))
        else:
            yield Row(
                part, name, *_scaled(speed, runs[0]["tokens_per_second"], count, "rank"), SCALING_WANTED
            )
        yield Row(part, f"{name}, waiting for data", f"{run['data_wait_share']:.1%} of the time")
    for step in steps:
        name, speed, count = f"step alone, {_ranks(step['ranks'])}", step["tokens_per_second"], step["ranks"]
        if count == 1:
            yield Row(part, name, f"{_tokens(speed)}, {step['ms']:.0f} ms")
            continue
        value, ratio, beside = _scaled(speed, steps[0]["tokens_per_second"], count, "rank")
        yield Row(part, name, f"{value}, {step['ms']:.0f} ms", ratio, beside)
        yield Row(part, f"{name}, sending on its own", f"{step['communication_ms']:.1f} ms")
        if "exposed_ms" in step:
            exposed = step["exposed_ms"]
            value = f"{exposed:.1f} ms, {exposed / step['ms']:.1%} of the time"
            yield Row(part, f"{name}, waiting for sending", value)
            own = step["own_ms"]
            yield Row(part, f"{name}, each for itself", f"{min(own):.1f} to {max(own):.1f} ms")
    if "curves" in found:
        curves = found["curves"]
        apart, relative = curves["largest_difference"], curves["largest_relative_difference"]
        value = f"at most {apart:.2e} ({relative:.1e} of the loss) in {curves['steps']} steps"
        fall = abs(curves["fall"])
        yield Row(part, "loss curves apart", value, apart / fall if fall else None, "the fall of the loss")


def _run(part: str, found: dict[str, Any]) -> Iterator[Row]:
    for stage, figures in found.get("stages", {}).items():
        said = [f"{figures['seconds']:.1f} s"]
        if "tokens_per_second" in figures:
            said.append(_tokens(figures["tokens_per_second"]))
        if "data_wait_share" in figures:
            said.append(f"{figures['data_wait_share']:.1%} waiting for data")
        if "acceptance_length" in figures:
            said.append(f"acceptance length {figures['acceptance_length']:.3f}")
        yield Row(part, f"{stage}, {found['target']}", ", ".join(said))


_ROWS = {"topology": _topology, "capture": _capture, "training": _training, "smollm2": _run}


def _scaled(speed: float, of_one: float, count: int, noun: str) -> tuple[str, float, str]:
    """Value, ratio and what it is to, for `count` of something beside as many times one."""
    return _tokens(speed), speed / (count * of_one), f"{count} x 1 {noun}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _tokens(speed: float) -> str:
    return f"{speed:,.0f} tokens/s"


def _gb(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s"
