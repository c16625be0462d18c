"""Takes whole batches of states from SGLang's hooks and puts each sample's rows into its shard.

Legend: T rows of a batch, A auxiliary layers, H hidden size, R rows with a final state.

All of it happens in a thread of the scheduler process, so that the scheduler never waits: for memory, for a
copy, or for a disk. From a GPU the copies run on a stream of their own, after what the model has queued, into
page-locked memory. At most `MAX_WAITING_BATCHES` wait for the thread; then the scheduler does wait.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3_core.capture.assemble import ShardAssembler, check_rows
from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.sglang_batch import BatchPart, Stitcher
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.shards import CapturedSample

logger = logging.getLogger(__name__)

MAX_WAITING_BATCHES = 4


@dataclass
class CapturedBatch:
    """One batch on its way: its parts, ids [T], and states [T, H] by capture id, the final one last."""

    parts: Sequence[BatchPart]
    input_ids: torch.Tensor
    states: list[torch.Tensor]
    event: torch.cuda.Event | None = None

    @classmethod
    def begin(
        cls, parts: Sequence[BatchPart], input_ids: torch.Tensor, states: list[torch.Tensor]
    ) -> CapturedBatch:
        """A batch whose states the GPU is still computing on the current stream."""
        batch = cls(parts, input_ids, states)
        if states[0].is_cuda:
            batch.event = torch.cuda.Event()
            batch.event.record()
        return batch


class StatesWriter:
    """The thread that fills shards.

    Args:
        job: what is captured.
        device: where the states are.
    """

    def __init__(self, job: CaptureJob, device: torch.device) -> None:
        self._job, self._device = job, device
        self._samples = read_dataset(Path(job.dataset_folder))
        self._assembler = ShardAssembler(job, self._samples, pin_memory=device.type == "cuda")
        self._places: dict[int, CapturedSample] = {}
        self._stitcher = Stitcher(job.engine)
        self._failed = False
        self._queue: queue.Queue[CapturedBatch] = queue.Queue(MAX_WAITING_BATCHES)
        threading.Thread(target=self._run, name="states-writer", daemon=True).start()

    def put(self, batch: CapturedBatch) -> None:
        """Hand over a batch."""
        self._queue.put(batch)

    def _run(self) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
        while True:
            batch = self._queue.get()
            if self._failed:
                continue
            try:
                with torch.inference_mode():
                    self._confirm(batch, self._copy(batch, stream))
            except Exception as error:
                logger.exception("capture failed while states were written")
                self._job.record_failure(error)
                self._failed = True

    def _copy(self, batch: CapturedBatch, stream: torch.cuda.Stream | None) -> list[int]:
        """Copy a batch into its places, to the end; returns its ids."""
        for part in batch.parts:
            sample = self._samples[part.sample]
            if self._stitcher.begin(part, sample.key, len(sample)):
                self._places[part.sample] = self._assembler.place(
                    sample.key, sample.input_ids.tolist(), len(sample)
                )
        if stream is None or batch.event is None:
            self._fill(batch)
            return batch.input_ids.tolist()
        with torch.cuda.stream(stream):
            stream.wait_event(batch.event)
            ids = torch.empty(len(batch.input_ids), dtype=batch.input_ids.dtype, pin_memory=True)
            ids.copy_(batch.input_ids, non_blocking=True)
            self._fill(batch)
            stream.record_event().synchronize()
        return ids.tolist()

    def _fill(self, batch: CapturedBatch) -> None:
        aux = torch.stack(batch.states[:-1], dim=1)
        wanted = [self._final_range(part) for part in batch.parts]
        rows = [
            self._places[part.sample].final_rows[first:last] + (part.start - part.offset)
            for part, (first, last) in zip(batch.parts, wanted, strict=True)
        ]
        final = batch.states[-1][self._to_device(torch.cat(rows))]
        done = 0
        for part, (first, last) in zip(batch.parts, wanted, strict=True):
            place = self._places[part.sample]
            place.aux_states[part.offset : part.offset + part.num_rows].copy_(
                aux[part.start : part.start + part.num_rows], non_blocking=True
            )
            place.final_states[first:last].copy_(final[done : done + last - first], non_blocking=True)
            done += last - first

    def _final_range(self, part: BatchPart) -> tuple[int, int]:
        """Which of a sample's final states lie in a part."""
        rows = self._places[part.sample].final_rows
        first, last = torch.searchsorted(rows, torch.tensor([part.offset, part.offset + part.num_rows]))
        return int(first), int(last)

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else rows

    def _confirm(self, batch: CapturedBatch, ids: list[int]) -> None:
        """Compare the ids of samples that are whole with what was sent and pass these samples on."""
        for part in batch.parts:
            sample = self._samples[part.sample]
            run = ids[part.start : part.start + part.num_rows]
            whole = self._stitcher.add(part, len(sample), run)
            if whole is not None:
                check_rows(self._job.engine, sample, whole, len(whole))
                del self._places[part.sample]
                self._assembler.filled(sample.key)
