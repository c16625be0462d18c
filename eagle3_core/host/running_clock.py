"""A clock that stops while its own process does."""

from __future__ import annotations

import time

MOST_SECONDS = 2.0
"""So much is counted between two readings at most: who watches reads more often."""


class RunningClock:
    """Seconds in which this process ran, for time-outs of what it watches.

    Where it did not (a suspended host, Ctrl-Z, a wait for room on a full disk), nobody heard what was
    watched, and on a suspended host that did not run either.
    """

    def __init__(self) -> None:
        self._seconds, self._read = 0.0, time.monotonic()

    def now(self) -> float:
        """Seconds since the clock was made; of a longer pause between readings, `MOST_SECONDS` count."""
        before, self._read = self._read, time.monotonic()
        self._seconds += min(self._read - before, MOST_SECONDS)
        return self._seconds
