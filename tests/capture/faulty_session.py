"""A capture session whose engine goes wrong on request; run in place of `eagle3_core.capture.session`.

The engine is the reference, in its own process as always. Faults come from the environment:

    FAULT_KILLS    keys, comma-separated: computing one of these samples kills the process, each time
    FAULT_ONCE     path: the process kills itself once, at the sample whose key the file holds
    FAULT_STALLS   path: the same, but the process hangs instead
    FAULT_LOAD     `dies` or `hangs`: what happens before the engine is loaded
    FAULT_SECONDS  slows every sample down
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from eagle3_core.capture import session
from eagle3_core.capture.job import Journal
from eagle3_core.capture.reference import ReferenceModel

original_started = Journal.started
original_init = ReferenceModel.__init__


def started(self: Journal, key: str) -> None:
    """Note the sample as the engine does, then go wrong if this is the one."""
    original_started(self, key)
    time.sleep(float(os.environ.get("FAULT_SECONDS", "0")))
    if key in os.environ.get("FAULT_KILLS", "").split(","):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_due("FAULT_ONCE", key):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_due("FAULT_STALLS", key):
        time.sleep(600)


def _is_due(variable: str, key: str) -> bool:
    path = Path(os.environ.get(variable, "/nonexistent"))
    if not path.is_file() or path.read_text() != key:
        return False
    path.unlink()
    return True


def init(self: ReferenceModel, *arguments: object, **named: object) -> None:
    """Load the model, or do not."""
    if os.environ.get("FAULT_LOAD") == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if os.environ.get("FAULT_LOAD") == "hangs":
        time.sleep(600)
    original_init(self, *arguments, **named)  # type: ignore[arg-type]


if __name__ == "__main__":
    Journal.started = started  # type: ignore[method-assign]
    ReferenceModel.__init__ = init  # type: ignore[method-assign]
    code = session.main(sys.argv[1])
    sys.stdout.flush()
    os._exit(code)
