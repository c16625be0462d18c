"""Figures as people read them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """`1.5 GiB`."""
    unit = UNITS[0]
    for unit in UNITS:
        if abs(count) < 1024 or unit == UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def format_seconds(seconds: float | None) -> str:
    """`4.2 s`, `3 min 05 s`, `2 h 10 min`; a dash where there is none."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(count: float | None) -> str:
    """`12,345`; a dash where there is none."""
    return "–" if count is None else f"{count:,.0f}"


def format_number_of(count: int, noun: str) -> str:
    """`1 file`, `12,345 files`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def format_rate(rate: float | None) -> str:
    """`0.583`; a dash where there is none."""
    return "–" if rate is None else f"{rate:.3f}"
