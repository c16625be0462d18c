"""How often tests kill a writer: a few times by default, EAGLE3_KILLS times for a thorough look."""

from __future__ import annotations

import os


def num_kills(few: int = 8) -> int:
    """Rounds of a test that kills a process at a random moment."""
    return int(os.environ.get("EAGLE3_KILLS", few))
