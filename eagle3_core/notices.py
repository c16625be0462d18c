"""Turns of a step that whoever watches a run should see: log lines of a name of their own.

Like any line they are in the step's log and in the log of its task; the terminal shows them besides.
"""

from __future__ import annotations

import logging
import re

NOTICES = "eagle3_core.notice"
LINE = re.compile(rf"^[\w:., -]*\b{re.escape(NOTICES)}: ")

logger = logging.getLogger(NOTICES)


def give_notice(text: str) -> None:
    """Log a line that is also shown at the terminal."""
    logger.info("%s", text)


def is_notice(line: str) -> bool:
    """Whether a line of a step's log, or of this process's, is one of `give_notice`."""
    return LINE.match(line) is not None


def resumed_at(step: int, num_steps: int | None) -> str:
    """`resumed at step 1,200 of 4,000`.

    Args:
        step: optimizer steps that were done already.
        num_steps: of the whole training; None where that is not known.
    """
    return f"resumed at step {step:,}" + (f" of {num_steps:,}" if num_steps is not None else "")
