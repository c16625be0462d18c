from __future__ import annotations

import pytest

from eagle3_core.report.figures import format_bytes, format_count, format_rate, format_seconds


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 50, "3072.0 TiB")],
)
def test_bytes_are_shown_in_the_largest_unit_below_1024(count: int, shown: str) -> None:
    assert format_bytes(count) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "–"), (4.25, "4.2 s"), (59.94, "59.9 s"), (185, "3 min 05 s"), (7810, "2 h 10 min")],
)
def test_seconds_grow_into_minutes_and_hours(seconds: float | None, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_what_is_missing_is_a_dash_and_zero_is_not() -> None:
    assert (format_count(None), format_rate(None)) == ("–", "–")
    assert (format_count(0), format_rate(0.0)) == ("0", "0.000")
