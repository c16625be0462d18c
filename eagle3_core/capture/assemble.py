"""Collects the states of single samples into shards and writes each shard while its samples arrive.

Legend: S tokens of a sample, A auxiliary layers, H hidden size.

Runs where the states are: in the engine's worker or in the step itself. Rows go straight into the shard's
memory; there is no file for a sample.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_core.capture.job import MAX_SHARDS_IN_FLIGHT, CaptureJob
from eagle3_core.errors import CaptureError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.disk import is_no_space
from eagle3_core.store.files import write_atomic
from eagle3_core.store.shard_writer import ShardFile
from eagle3_core.store.shards import CapturedSample, PackedShard, PlannedShard

if TYPE_CHECKING:
    import torch

NUM_WRITERS = 2
"""Threads that hash and write: one of them is slower than a fast GPU makes states."""


class _OpenShard:
    """A shard whose samples arrive in any order and are written in theirs.

    Args:
        planned: which shard.
        packed: its memory.
        path: of the file.
        with_sha256: record a SHA-256 too.
    """

    def __init__(self, planned: PlannedShard, packed: PackedShard, path: Path, with_sha256: bool) -> None:
        self.planned, self.packed, self._path, self._with_sha256 = planned, packed, path, with_sha256
        self.file_bytes = packed.file_bytes
        self.missing = set(packed.keys)
        self._here: dict[int, torch.cuda.Event | None] = {}
        self._num_written = 0
        self._is_whole = False
        self._error: Exception | None = None
        self._file: ShardFile | None = None
        self._lock = threading.Lock()

    def arrived(self, index: int, copied: torch.cuda.Event | None) -> None:
        """A sample is in place, or will be when its copy is done."""
        self.missing.remove(self.packed.keys[index])
        self._here[index] = copied

    def write(self, entry_path: Path) -> None:
        """Write the samples whose turn it is, and after the last one the shard's manifest entry."""
        with self._lock:
            if self._is_whole:
                return
            if self._error is not None:
                raise self._error
            try:
                if self._file is None:
                    self._file = ShardFile(self._path, self.packed, self._with_sha256)
                self._write_next(self._file)
                if self._num_written == len(self.packed.keys):
                    write_atomic(entry_path, self._file.finish().model_dump_json())
                    self._is_whole = True
            except Exception as error:
                if self._file is not None:
                    self._file.abandon(error)
                if is_no_space(error):  # all of it is still in memory: it can be written again
                    self._path.unlink(missing_ok=True)
                    self._file, self._num_written = None, 0
                else:
                    self._error = error
                raise

    def _write_next(self, file: ShardFile) -> None:
        while self._num_written in self._here:
            copied = self._here[self._num_written]
            if copied is not None:
                copied.synchronize()
            file.write_sample(self._num_written)
            self._num_written += 1


class ShardAssembler:
    """Fills and writes the shards of a job.

    Args:
        job: what is captured.
        samples: all samples of the dataset, in order.
        pin_memory: page-locked memory for copies from a GPU.

    `place` and `filled` are called by one thread; others write.
    """

    def __init__(self, job: CaptureJob, samples: Sequence[Sample], pin_memory: bool = False) -> None:
        self._job, self._samples, self._pin = job, samples, pin_memory
        self._where: dict[str, tuple[PlannedShard, int, Sample]] = {
            sample.key: (shard, place, sample)
            for shard in job.shards
            for place, sample in enumerate(job.samples_of(shard, samples))
        }
        self._open: dict[int, _OpenShard] = {}
        self._begun: set[int] = set()
        self._placed: set[str] = set()
        self._writing: list[Future[None]] = []
        self._guard = job.guard
        self._writer = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="shard-writer")

    def place(self, key: str, token_ids: Sequence[int], num_rows: int) -> CapturedSample:
        """The memory for one sample's states, to be filled and then confirmed with `filled`.

        Args:
            key: key of the sample.
            token_ids: the ids that the engine says it ran.
            num_rows: the rows of states that the engine has for them.

        Raises:
            CaptureError: an unknown key, a sample that came twice, other ids or another number of rows than
                were sent, or more open shards than allowed.
        """
        if key not in self._where:
            raise CaptureError(f"{self._job.engine} returned states of {key!r}, which was not asked for")
        if key in self._placed:
            raise CaptureError(f"{self._job.engine} returned the states of sample {key} twice")
        shard, place, sample = self._where[key]
        check_rows(self._job.engine, sample, token_ids, num_rows)
        if shard.index not in self._open:
            self._open[shard.index] = self._begin(shard)
            self._begun.add(shard.index)
        self._placed.add(key)
        return self._open[shard.index].packed.sample(place)

    def filled(self, key: str, copied: torch.cuda.Event | None = None) -> None:
        """Confirm that a sample's states are in place; it is written when those before it are.

        Args:
            key: of the sample.
            copied: of a copy that has only begun; the thread that writes waits for it.
        """
        shard, place, _ = self._where[key]
        opened = self._open[shard.index]
        opened.arrived(place, copied)
        if not opened.missing:
            del self._open[shard.index]
        future = self._writer.submit(self._write, opened)
        if not opened.missing:
            self._writing.append(future)

    def add(self, key: str, token_ids: Sequence[int], states: torch.Tensor) -> None:
        """Take the states [S, A + 1, H] of one sample, the final layer last."""
        place = self.place(key, token_ids, len(states))
        fill(place, states)
        self.filled(key)

    def drain(self) -> None:
        """Wait until every shard is written; called when all samples that were asked for have come.

        Raises:
            CaptureError: writing failed, or as `check_whole`.
        """
        self._wait(len(self._writing))
        self.check_whole(self._open)

    def check_whole(self, indices: Iterable[int]) -> None:
        """Called when all samples of these shards should have come.

        Raises:
            CaptureError: samples of one are missing.
        """
        for index in indices:
            if index not in self._begun:
                raise CaptureError(f"{self._job.engine} returned no states for any sample of shard {index}")
        for unfinished in self._open.values():
            names = ", ".join(sorted(unfinished.missing)[:5])
            raise CaptureError(
                f"{self._job.engine} returned no states for {len(unfinished.missing)} samples of "
                f"{unfinished.planned.file_name}: {names}"
            )

    def close(self) -> None:
        """End the writing thread after what it has begun."""
        self._writer.shutdown(wait=True)

    def _begin(self, shard: PlannedShard) -> _OpenShard:
        if len(self._open) >= MAX_SHARDS_IN_FLIGHT:
            raise CaptureError(
                f"states of {shard.file_name} came while {len(self._open)} shards are unfinished",
                expected=f"at most {MAX_SHARDS_IN_FLIGHT} shards at once",
            )
        self._wait(len(self._open) + len(self._writing) + 1 - MAX_SHARDS_IN_FLIGHT)
        samples = self._job.samples_of(shard, self._samples)
        packed = PackedShard(samples, self._job.layout, pin_memory=self._pin)
        path = Path(self._job.folder) / shard.file_name
        return _OpenShard(shard, packed, path, self._job.with_sha256)

    def _wait(self, count: int) -> None:
        """Wait for the oldest `count` shards being written, and pass on an error of any that is done."""
        for future in self._writing[: max(0, count)]:
            future.result()
        for future in self._writing:
            if future.done():
                future.result()
        self._writing = [future for future in self._writing if not future.done()]

    def _write(self, shard: _OpenShard) -> None:
        """Write what has arrived; the entry beside a whole shard says that it is there.

        On a full disk the half file is removed, and the shard written anew from memory when there is space.
        """
        entry_path, name = self._job.entry_path(shard.planned), shard.planned.file_name
        write = functools.partial(shard.write, entry_path)
        try:
            self._guard.patiently(write, entry_path.parent, shard.file_bytes, name)
        except OSError as error:
            failure = CaptureError(
                f"cannot write {shard.planned.file_name} into {self._job.folder} ({error.strerror or error})",
                remedy="make room or check the disk, then run again: finished shards are kept",
            )
            self._job.record_failure(failure)
            raise failure from error
        except Exception as error:
            self._job.record_failure(error)
            raise


def fill(place: CapturedSample, states: torch.Tensor) -> None:
    """Copy states [S, A + 1, H] into a sample's place: all rows of A layers, the wanted rows of the last.

    From a GPU into pinned memory the copies are only begun: the caller waits for an event.
    """
    num_aux = place.aux_states.shape[1]
    place.aux_states.copy_(states[:, :num_aux].contiguous(), non_blocking=True)
    if len(place.final_rows):
        rows = place.final_rows.to(states.device, non_blocking=True)
        place.final_states.copy_(states[rows, num_aux], non_blocking=True)


def check_rows(engine: str, sample: Sample, token_ids: Sequence[int], num_rows: int) -> None:
    """Compare what an engine ran with what was sent.

    Raises:
        CaptureError: names sample, engine and both lengths, or the first id that differs.
    """
    sent = sample.input_ids.tolist()
    if len(token_ids) != len(sent) or num_rows != len(sent):
        raise CaptureError(
            f"sample {sample.key}: {engine} returned {num_rows} rows of states for {len(token_ids)} tokens",
            expected=f"{len(sent)} rows, one for each token sent",
            remedy="turn prefix caching off and capture again",
        )
    if list(token_ids) != sent:
        first = next(
            j for j, (ours, theirs) in enumerate(zip(sent, token_ids, strict=True)) if ours != theirs
        )
        raise CaptureError(
            f"sample {sample.key}: {engine} ran token {token_ids[first]} at position {first}",
            expected=f"{sent[first]} as sent",
        )
