"""Writes checkpoints in a thread while training goes on: one at a time, and the end waits for the last."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.snapshot import HostCopy

logger = logging.getLogger(__name__)
LEAVING_SECONDS = 120.0
"""How long the end of a failed training waits for a checkpoint that is being written."""


class BackgroundSaver:
    """Hands states to a thread that writes, hashes and publishes them; use as a context manager.

    Two host copies take turns: a state is copied while the one before may still be written. What the thread
    could not do is raised by the next call of any method.

    Args:
        folder: where checkpoints go.

    Attributes:
        blocked_seconds: time that `save` has taken, waiting for the checkpoint before included.
    """

    def __init__(self, folder: ResumeFolder) -> None:
        self._folder = folder
        self._copies = (HostCopy(), HostCopy())
        self._turn = 0
        self._job: _Job | None = None
        self.blocked_seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written; a periodic save can then wait for its next turn."""
        return self._job is not None and self._job.is_alive()

    def save(
        self, state: dict[str, Any], step: int, best: Sequence[str] = (), new_best: str | None = None
    ) -> None:
        """Make a state the newest checkpoint, soon; its tensors may be changed as soon as this returns.

        Args:
            state: `parameters` (whole weights by name) and whatever else a resume needs.
            step: optimizer steps done.
            best: files of the best weights that belong to this state.
            new_best: the one of them that holds the weights of this very state and has yet to be written.

        Raises:
            Eagle3Error: the checkpoint before this one could not be written.
        """
        started = time.monotonic()
        copy = self._copies[self._turn].take(state)
        self.wait()
        self._turn = 1 - self._turn
        self._job = _Job(self._folder, copy, step, tuple(best), new_best)
        self._job.start()
        self.blocked_seconds += time.monotonic() - started

    def check(self) -> None:
        """Raise what the thread could not do, without waiting for it."""
        if self._job is not None and not self._job.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until all that was handed over is safe; raises what the thread could not do."""
        job, self._job = self._job, None
        if job is not None:
            job.join()
            if job.error is not None:
                raise job.error

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if value is None:
            self.wait()
            return
        job = self._job
        if job is not None:  # training has failed already; what it saved last should be whole
            job.join(LEAVING_SECONDS)
            if job.error is not None:
                logger.warning("the last checkpoint could not be written: %s", job.error)


class _Job(threading.Thread):
    """One checkpoint on its way."""

    def __init__(
        self,
        folder: ResumeFolder,
        state: dict[str, Any],
        step: int,
        best: tuple[str, ...],
        new_best: str | None,
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._folder, self._state, self._step = folder, state, step
        self._best, self._new_best = best, new_best
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._new_best is not None:
                self._folder.save_weights(self._new_best, self._state["parameters"])
            self._folder.save(self._state, self._step, self._best)
        except BaseException as error:
            self.error = error
