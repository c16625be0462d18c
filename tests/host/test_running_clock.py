"""A clock that stops while its own process does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle3_core.host import running_clock
from eagle3_core.host.running_clock import MOST_SECONDS, RunningClock


def test_a_long_pause_between_readings_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 101.0, 102.5, 5000.0, 5001.0])
    monkeypatch.setattr(running_clock, "time", SimpleNamespace(monotonic=lambda: next(times)))
    clock = RunningClock()
    assert [clock.now() for _ in range(4)] == [1.0, 2.5, 2.5 + MOST_SECONDS, 3.5 + MOST_SECONDS]
