"""TensorBoard event files with the same records as `metrics.jsonl`, for whoever watches live.

The files belong to a run's folder: an attempt or a run that goes on from a checkpoint writes them again from
the records that stay, so no point is there twice. Values are found under the names of the records' fields:
`step/loss`, `loss_by_ttt_step/0`, `heldout/acceptance_length`, ...
"""

from __future__ import annotations

import io
import logging
import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_core.store.files import append

logger = logging.getLogger(__name__)
EVENT_FILES = "events.out.tfevents.*"
FILE_VERSION = "brain.Event:2"
STEP_FIELDS = (
    "loss", "grad_norm", "learning_rate", "tokens", "seconds", "data_wait_seconds", "tokens_per_second",
    "mfu", "peak_memory_gb", "acceptance_length", "draft_vocabulary_share",
)  # fmt: skip


class EventFiles:
    """Mirrors metrics into one folder; see `metrics_log.Mirror`.

    Args:
        folder: made if it is missing; event files of an earlier attempt in it are removed.

    Raises:
        ImportError: the environment has no TensorBoard.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._encoder = event_pb2.Event, summary_pb2.Summary, RecordWriter
        self._folder = self._path = folder
        self._handle: io.FileIO | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def restart(self, records: Iterable[dict[str, Any]]) -> None:
        """Begin a new file with these records alone."""
        self.close()
        for old in self._folder.glob(EVENT_FILES):
            old.unlink()
        path = self._folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._path, self._handle = path, io.FileIO(path, "w")
        self._write([self._event(wall_time=time.time(), file_version=FILE_VERSION)])
        self.add(records)

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        """Add the points of these records."""
        if self._handle is None:
            self.restart(())
        self._write([self._event_of(record) for record in records])

    def close(self) -> None:
        """Close the file; a later record would begin another."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _event_of(self, record: Mapping[str, Any]) -> Any:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record).items()]
        return self._event(
            wall_time=record.get("time", 0.0), step=record["step"], summary=self._summary(value=values)
        )

    def _write(self, events: Sequence[Any]) -> None:
        block = io.BytesIO()
        encoder = self._encoder(block)
        for event in events:
            encoder.write(event.SerializeToString())
        assert self._handle is not None
        append(self._handle, block.getvalue(), self._path)


def event_files(folder: Path) -> EventFiles | None:
    """Event files in a run's `tensorboard` folder; None, and a line in the log, where there can be none."""
    try:
        return EventFiles(folder)
    except ImportError as error:
        logger.warning("no TensorBoard files: %s; install tensorboard into the engine environment", error)
        return None


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Tag and value of every point of a record; what is not known or not finite is left out."""
    found: dict[str, Any] = {}
    if record["type"] == "step":
        found |= {f"step/{name}": record.get(name) for name in STEP_FIELDS}
        found |= _by_step("loss_by_ttt_step", record.get("loss_by_step"))
        found |= _by_step("unconditional_by_ttt_step", record.get("unconditional"))
        found |= _by_step("conditional_by_ttt_step", record.get("conditional"))
    elif record["type"] == "skipped":
        found["step/skipped"] = 1.0
    elif record["type"] == "evaluation":
        heldout, rates = record["heldout"], record.get("rates") or {}
        found["heldout/loss"] = record["heldout_loss"]
        found["heldout/acceptance_length"] = heldout["acceptance_length"]
        found |= _by_step("heldout_loss_by_ttt_step", record.get("heldout_loss_by_step"))
        found |= _by_step("heldout_accepted_at_position", heldout["per_position"])
        found |= _by_step("heldout_unconditional_by_ttt_step", rates.get("unconditional"))
        found |= _by_step("heldout_conditional_by_ttt_step", rates.get("conditional"))
    return {tag: float(value) for tag, value in found.items() if value is not None and math.isfinite(value)}


def _by_step(tag: str, values: Sequence[float | None] | None) -> dict[str, float | None]:
    return {f"{tag}/{number}": value for number, value in enumerate(values or ())}
