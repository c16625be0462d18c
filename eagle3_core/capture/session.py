"""One engine session, in a process of its own: `python -m eagle3_core.capture.session SPEC`.

It loads the engine, asks for shards and captures them until there are none left. It talks to the step that
started it in lines: events on standard output, each `EVENT_PREFIX` and JSON, and answers on standard input,
each the index of a shard or nothing. When standard input closes, the step is gone and the session ends itself
with everything that it started.

    session: {"event": "loaded"}      step:
    session: {"event": "want"}        step: 3
    session: {"event": "tokens", "tokens": 5120}
    session: {"event": "written", "shard": 3}
    session: {"event": "want"}        step: later (no space: finish what is in flight and ask again)
    session: {"event": "want"}        step: (an empty line: no shard is left)
"""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from eagle3_core.capture.engines import capture_engine
from eagle3_core.capture.job import LATER, CaptureJob, EngineEndedError, Later, wait_take
from eagle3_core.config import RunConfig
from eagle3_core.errors import EXIT_BUG, EXIT_OK, EXIT_USER_ERROR, Eagle3Error
from eagle3_core.step import LOG_FORMAT, end_process, end_with_descendants
from eagle3_core.store.dataset import Sample, read_dataset
from eagle3_core.store.files import write_atomic
from eagle3_core.store.shard_writer import write_packed_shard
from eagle3_core.store.shards import PackedShard, PlannedShard
from eagle3_core.target.info import inspect_target

EVENT_PREFIX = "@eagle3-session "
TOKEN_EVENT_SECONDS = 0.5
MAX_REASON = 1000
"""Letters of each part of an error: escaped, the three of them must fit into a line of output."""

logger = logging.getLogger(__name__)


class SessionSpec(BaseModel):
    """What a session is started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    config: RunConfig
    target_path: str
    job: CaptureJob


class _Line:
    """The session's side of the conversation with its step."""

    def __init__(self, job: CaptureJob, samples: Sequence[Sample]) -> None:
        self._job, self._samples = job, samples
        self._shards = {shard.index: shard for shard in job.shards}
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._tokens = 0
        self._last = 0.0
        self._is_loaded = False
        threading.Thread(target=self._listen, name="step-watch", daemon=True).start()

    def say(self, event: str, **facts: Any) -> None:
        """Send one event."""
        document = json.dumps({"event": event, **facts}, ensure_ascii=False)
        os.write(1, f"{EVENT_PREFIX}{document}\n".encode(errors="replace"))

    def say_failed(self, error: Exception, *reason: str | None) -> None:
        """Send why the engine does not go on: what was found, expected and can be done, each cut to a line.

        An error of ours would come again with another engine, unless it says that the engine ended.
        """
        cut = [" ".join(text.split())[:MAX_REASON] if text else None for text in (*reason, None, None)]
        died = isinstance(error, EngineEndedError) or not isinstance(error, Eagle3Error)
        facts = dict(zip(("found", "expected", "remedy"), cut, strict=False))
        self.say("failed", died=died, kind=type(error).__name__, **facts)

    def take(self) -> PlannedShard | Later | None:
        """Ask for the next shard; one whose samples are all quarantined is written here, empty."""
        self.tell_tokens()
        while True:
            self.say("want")
            answer = self._answers.get().strip()
            if not answer:
                return None
            if answer == LATER.value:
                return LATER
            shard = self._shards[int(answer)]
            if self._job.samples_of(shard, self._samples):
                return shard
            write = functools.partial(self._write_empty, shard)
            self._job.guard.patiently(write, Path(self._job.folder), 0, shard.file_name)
            self.say("written", shard=shard.index)

    def _write_empty(self, shard: PlannedShard) -> None:
        path = Path(self._job.folder) / shard.file_name
        entry = write_packed_shard(path, PackedShard([], self._job.layout), self._job.with_sha256)
        write_atomic(self._job.entry_path(shard), entry.model_dump_json())

    def on_tokens(self, count: int) -> None:
        """Count captured tokens; the first call says that the engine is loaded."""
        if not self._is_loaded:
            self.say("loaded")
            self._is_loaded = True
        self._tokens += count
        if time.monotonic() - self._last >= TOKEN_EVENT_SECONDS:
            self.tell_tokens()

    def tell_tokens(self) -> None:
        """Send what has been counted."""
        if self._tokens:
            self.say("tokens", tokens=self._tokens)
        self._tokens, self._last = 0, time.monotonic()

    def _listen(self) -> None:
        # A file object of its own: a child that an engine forks closes `sys.stdin`, and would wait for ever
        # for the lock that this thread holds while it reads.
        with os.fdopen(os.dup(0)) as answers:
            for line in answers:
                self._answers.put(line)
        end_with_descendants()


def main(path: str) -> int:
    """Run the session that a spec file describes; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stdout, force=True)
    spec = SessionSpec.model_validate_json(Path(path).read_text())
    samples = read_dataset(Path(spec.job.dataset_folder))
    line = _Line(spec.job, samples)
    try:
        if not any(spec.job.samples_of(shard, samples) for shard in spec.job.shards):
            wait_take(line.take)()  # writes what is left, all of it empty
            return EXIT_OK
        info = inspect_target(Path(spec.target_path))
        capture = capture_engine(spec.config.capture.engine)
        for shard, _ in capture(spec.config, info, spec.job, samples, line.on_tokens, line.take):
            line.tell_tokens()
            line.say("written", shard=shard.index)
    except Eagle3Error as error:
        line.say_failed(error, error.found, error.expected, error.remedy)
        return EXIT_USER_ERROR
    except Exception as error:
        logger.exception("the capture engine failed")
        line.say_failed(error, f"{type(error).__name__}: {error}")
        return EXIT_BUG
    return EXIT_OK


if __name__ == "__main__":
    end_process(main(sys.argv[1]))
