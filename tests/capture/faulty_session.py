"""A capture session whose engine goes wrong on request; run in place of `eagle3_core.capture.session`.

The engine is the reference, in its own process as always, or a quick one whose states are random numbers.
What it does comes from the environment:

    FAULT_ENGINE   `random` for the quick engine
    FAULT_KILLS    keys, comma-separated: computing one of these samples kills the process, each time
    FAULT_ONCE     path: the process kills itself once, at the sample whose key the file holds
    FAULT_STALLS   path: the same, but the process hangs instead
    FAULT_LOAD     `dies`, `hangs` or `complains` at length: what happens before the engine is loaded
    FAULT_PORT     path: the first engine that finds this file removes it, and cannot be loaded
    FAULT_HOLDS    path: every sample but the first two is held up until there is such a file
    FAULT_SECONDS  slows every sample down
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture import session
from eagle3_core.capture.assemble import ShardAssembler
from eagle3_core.capture.job import CaptureJob, Later, wait_take
from eagle3_core.capture.journal import Journal
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError
from eagle3_core.step import end_process
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import PlannedShard
from eagle3_core.target.info import TargetInfo

if TYPE_CHECKING:
    from eagle3_core.capture.reference import ReferenceModel

original_started = Journal.started


def started(self: Journal, key: str) -> None:
    """Note the sample as the engine does, then go wrong if this is the one."""
    original_started(self, key)
    time.sleep(float(os.environ.get("FAULT_SECONDS", "0")))
    held = os.environ.get("FAULT_HOLDS")
    while held and key not in ("sample-000", "sample-001") and not Path(held).exists():
        time.sleep(0.05)
    if key in os.environ.get("FAULT_KILLS", "").split(","):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_due("FAULT_ONCE", key):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_due("FAULT_STALLS", key):
        time.sleep(600)


def capture_random(
    config: RunConfig,
    info: TargetInfo,
    job: CaptureJob,
    samples: Sequence[Sample],
    on_tokens: Callable[[int], None],
    take: Callable[[], PlannedShard | Later | None] | None = None,
) -> Iterator[tuple[PlannedShard, FileEntry]]:
    """An engine without a model, for tests of what happens around engines."""
    import torch

    _load()
    on_tokens(0)
    assert take is not None
    take = wait_take(take)
    assembler, journal = ShardAssembler(job, samples), job.journal
    while (shard := take()) is not None:
        for sample in sorted(job.samples_of(shard, samples), key=lambda one: one.key not in job.alone):
            journal.started(sample.key)
            states = torch.randn(len(sample), len(job.capture_ids), info.hidden_size)
            journal.finished(sample.key)
            assembler.add(sample.key, sample.input_ids.tolist(), states)
            on_tokens(len(sample))
        assembler.drain()
        entry = job.finished_entry(shard)
        assert entry is not None
        yield shard, entry
    assembler.close()


def _is_due(variable: str, key: str) -> bool:
    path = Path(os.environ.get(variable, "/nonexistent"))
    if not path.is_file() or path.read_text() != key:
        return False
    path.unlink()
    return True


def init(self: ReferenceModel, *arguments: object, **named: object) -> None:
    """Load the model, or do not."""
    _load()
    original_init(self, *arguments, **named)  # type: ignore[arg-type]


def _load() -> None:
    if os.environ.get("FAULT_LOAD") == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if os.environ.get("FAULT_LOAD") == "hangs":
        time.sleep(600)
    if os.environ.get("FAULT_LOAD") == "complains":
        raise CaptureError(f"the engine takes none of\n{'ü' * 20000}")
    try:
        os.unlink(os.environ.get("FAULT_PORT", "/nonexistent"))
    except FileNotFoundError:
        return
    raise CaptureError("the port is taken")


if __name__ == "__main__":
    Journal.started = started  # type: ignore[method-assign]
    if os.environ.get("FAULT_ENGINE") == "random":
        session.capture_engine = lambda name: capture_random  # type: ignore[assignment]
    else:
        from eagle3_core.capture.reference import ReferenceModel

        original_init = ReferenceModel.__init__
        ReferenceModel.__init__ = init  # type: ignore[method-assign]
    end_process(session.main(sys.argv[1]))
