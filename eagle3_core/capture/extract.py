"""The step `extract`: captures the target's hidden states of a dataset into shards.

Shards that are in the manifest and match their hash are left alone; the others are made by engine sessions in
processes of their own, several side by side where there are GPUs for them. Where another host, or another run
on this one, is already at work on the same capture, this step takes shards from the same plan: whoever holds
the capture's lock writes the manifest, and the others wait for its last shard. With none missing no engine is
started.

Into a bucket one host captures at a time: finished shards are uploaded while others are made, and leave the
local disk when the bucket holds them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from eagle3_core.artifacts import FileEntry, Manifest
from eagle3_core.capture.job import CaptureJob, capture_layout, check_plan
from eagle3_core.capture.pool import EnginePool, session_prefix
from eagle3_core.capture.room import Backlog, Pauses, ShardRoom
from eagle3_core.capture.shard_queue import ShardQueue, Staging
from eagle3_core.config import RunConfig
from eagle3_core.contracts import ExtractResult, Rejection, StepSpec
from eagle3_core.errors import CaptureError, DiskFullError, FolderInUseError
from eagle3_core.report.figures import format_bytes
from eagle3_core.step import Progress
from eagle3_core.store.claims import Claims
from eagle3_core.store.condemned import condemned
from eagle3_core.store.dataset import Sample, read_dataset
from eagle3_core.store.disk import DiskGuard, guarding
from eagle3_core.store.files import file_problem
from eagle3_core.store.lease import LeaseHeldError
from eagle3_core.store.local import ArtifactWriter, LocalStore, tell_remade
from eagle3_core.store.open import open_store
from eagle3_core.store.shards import PlannedShard, plan_shards
from eagle3_core.target.info import inspect_target

POLL_SECONDS = 0.2
WAIT_REPORT_SECONDS = 60.0

logger = logging.getLogger(__name__)


def run(spec: StepSpec, progress: Progress) -> ExtractResult:
    """Capture what is missing and complete the capture.

    Raises:
        CaptureError: no samples, a plan made for something else, an engine that did not return what was asked
            for, or engines that die whatever they are given.
        FolderInUseError: another host captures the same into the bucket; names it.
        DiskFullError: the shards do not fit, or the disk became full and `limits` says to fail.
        TargetError: auxiliary layer ids that the target does not have.
    """
    config = spec.config
    info = inspect_target(Path(spec.target_path))
    layout = capture_layout(config, info)
    store = open_store(config)
    dataset = spec.inputs["dataset"]
    dataset_folder = store.fetch(dataset)
    samples = read_dataset(dataset_folder)
    plan = spec.outputs["capture"]
    check_plan(plan, samples, layout, info)
    shards = plan_shards(samples, layout, int(config.capture.shard_bytes))
    staging = Staging(store, plan.ref)
    for name in staging.remove_dead_sessions():
        logger.info("removed what the ended session %s had not finished", name)
    with contextlib.ExitStack() as stack:
        claims = Claims(staging.claims)
        stack.callback(claims.close)
        job = CaptureJob(
            engine=str(plan.identity.get("engine", config.capture.engine)),
            dataset_folder=str(dataset_folder),
            folder=str(staging.path),
            layout=layout,
            shards=tuple(shards),
            limits=config.limits,
            run_id=spec.run_id,
            with_sha256=config.capture.sha256,
        )
        work = _Work(spec, store, samples, job, staging, claims, progress)
        stack.callback(work.stop)
        stack.enter_context(guarding(work.guard))
        return work.run()


class _Work:
    """One host's part in a capture."""

    def __init__(
        self,
        spec: StepSpec,
        store: LocalStore,
        samples: Sequence[Sample],
        job: CaptureJob,
        staging: Staging,
        claims: Claims,
        progress: Progress,
    ) -> None:
        self._spec, self._store, self._samples, self._job = spec, store, samples, job
        self._plan = spec.outputs["capture"]
        self._staging, self._queue = staging, ShardQueue(job.shards, staging, claims)
        pauses = Pauses(progress.pause)
        self.guard = DiskGuard(spec.config.limits, spec.run_id, functools.partial(pauses.set, "disk"))
        backlog = _backlog(spec.config, staging)
        self._room = ShardRoom(self.guard, staging.sessions, session_prefix(), job, samples, backlog)
        self._room_is_checked = not spec.config.limits.check_disk
        self._count = _Count(progress, job.shards, samples)
        self._pool = EnginePool(
            spec.config, spec.target_path, job, samples, self._queue, staging,
            self._count.on_tokens, self._count.on_loaded, self._room, pauses,
        )  # fmt: skip
        self._lock = contextlib.ExitStack()
        self._writer: ArtifactWriter | None = None
        self._is_following = False
        self._last_report = time.monotonic()

    def run(self) -> ExtractResult:
        """Work until the capture is complete, whoever completes it."""
        self._lead()
        while True:
            try:
                result = self._turn()
            except FolderInUseError as error:
                self._step_down(error)
                continue
            if result is not None:
                return result
            time.sleep(POLL_SECONDS)

    def _turn(self) -> ExtractResult | None:
        """Look once what has happened, do what follows from it; the result if the capture is complete."""
        manifest = None if self._writer else self._store.find(self._plan.ref)
        if manifest and manifest.state == "complete" and not condemned(self._store, manifest):
            logger.info("another process has completed %s", self._plan.ref)
            result = ExtractResult.model_validate(manifest.facts["result"])
            self._count.end(result)
            return result
        self._adopt(manifest)
        if self._writer and all(s.file_name in self._writer.files for s in self._job.shards):
            return self._complete(self._writer)
        self._pool.raise_error()
        if not self._pool.is_working:
            if self._queue.has_work():
                self._start()
            elif not self._lead():
                self._report_wait()
        return None

    def _step_down(self, error: FolderInUseError) -> None:
        """Follow from now on: another process has taken the lead over while this one stood still."""
        if self._writer is None or isinstance(error, LeaseHeldError):
            raise error
        logger.warning("%s", error)
        self._writer, self._is_following = None, True
        self._lock.close()

    def stop(self) -> None:
        """End the engines and give the lock back."""
        self._pool.stop()
        self._lock.close()

    def _lead(self) -> bool:
        """Become the one who writes the manifest, if nobody is; returns whether that is new."""
        if self._writer is not None:
            return False
        try:
            writer = self._store.writer(self._plan, self._spec.run_id, wait_seconds=0.0)
            self._writer = self._lock.enter_context(writer)
        except LeaseHeldError:  # its staging is not ours: what either makes, the other would make again
            raise
        except FolderInUseError:
            if not self._is_following:
                logger.info("another process leads %s: taking shards from the same plan", self._plan.ref)
            self._is_following = True
            return False
        for shard in self._job.shards:
            entry = self._staging.entry(shard)
            if entry is None or shard.file_name in self._writer.files:
                continue
            if problem := file_problem(self._writer.folder, entry):
                tell_remade({shard.file_name: problem})
                self._staging.withdraw(shard)
            else:
                self._record(self._writer, shard, entry)
        self._mark_done(self._writer.files)
        for shard in self._job.shards:
            if shard.file_name not in self._writer.files and self._queue.reopen(shard.index):
                self._count.was_lost(shard)
        return True

    def _adopt(self, manifest: Manifest | None) -> None:
        """Take note of shards that were published, here or on another host."""
        if self._writer is None:
            self._mark_done({entry.path: entry for entry in manifest.files} if manifest else {})
        for shard in self._queue.missing() if self._writer is None else self._job.shards:
            if self._writer is not None and shard.file_name in self._writer.files:
                continue
            entry = self._staging.entry(shard)
            if entry is None:
                continue
            if self._writer is not None:
                self._record(self._writer, shard, entry)
            self._queue.done(shard.index)
            self._count.shard_done(shard)

    def _record(self, writer: ArtifactWriter, shard: PlannedShard, entry: FileEntry) -> None:
        _check_counts(self._job, shard, self._samples, entry)
        writer.record(entry, seconds=self._count.seconds)

    def _mark_done(self, files: dict[str, FileEntry]) -> None:
        for shard in self._queue.missing():
            if shard.file_name in files:
                self._queue.done(shard.index)
                self._count.was_there(shard)

    def _start(self) -> None:
        missing = self._queue.missing()
        self._check_room(missing)
        logger.info("capturing %d shards with %s", len(missing), self._job.engine)
        self._count.begin()
        self._pool.start()

    def _check_room(self, missing: Sequence[PlannedShard]) -> None:
        """Refuse, before the first engine is loaded, shards that do not fit."""
        shortage = None if self._room_is_checked else self._room.shortage(missing)
        self._room_is_checked = True
        if shortage is not None:
            raise DiskFullError(
                f"{shortage} for {len(missing)} shards",
                remedy="make room, or set limits.check_disk to false to capture what fits first",
            )

    def _report_wait(self) -> None:
        if time.monotonic() - self._last_report > WAIT_REPORT_SECONDS:
            self._last_report = time.monotonic()
            names = ", ".join(shard.file_name for shard in self._queue.missing()[:5])
            logger.info("waiting for shards that other processes make: %s", names or "none")

    def _complete(self, writer: ArtifactWriter) -> ExtractResult:
        """Counts of the whole capture.

        Raises:
            CaptureError: a shard is missing or holds other counts or bytes than planned.
        """
        if not self._count.num_new_shards:
            logger.info("all shards are there already")
        quarantined: dict[str, str] = {}
        for shard in self._job.shards:
            entry = writer.files.get(shard.file_name)
            _check_counts(self._job, shard, self._samples, entry)
            quarantined |= entry.facts.get("quarantined", {}) if entry else {}
        seconds, captured = self._count.capture_seconds, self._count.captured_tokens
        result = ExtractResult(
            num_shards=len(self._job.shards),
            num_new_shards=self._count.num_new_shards,
            num_samples=len(self._samples) - len(quarantined),
            num_tokens=sum(len(s) for s in self._samples if s.key not in quarantined),
            bytes=sum(entry.bytes for entry in writer.files.values()),
            captured_tokens=captured,
            seconds=seconds,
            tokens_per_second=captured / seconds if captured and seconds else None,
            num_restarts=self._pool.num_restarts,
            quarantined=[Rejection(key=key, reason=reason) for key, reason in quarantined.items()],
        )
        writer.complete(seconds=self._count.seconds, result=result.model_dump(mode="json"))
        self._staging.remove()
        self._count.end(result)
        return result


class _Count:
    """Counts and clock of this step; the clock starts when the first engine is loaded."""

    def __init__(self, progress: Progress, shards: Sequence[PlannedShard], samples: Sequence[Sample]) -> None:
        self._progress, self._num_shards, self._samples = progress, len(shards), samples
        self.num_new_shards = self._num_done = self.captured_tokens = 0
        self._total = sum(map(len, samples))
        self._bytes, self._done_bytes = sum(shard.bytes for shard in shards), 0
        self._there = 0
        self._created = time.monotonic()
        self._started: float | None = None
        self._ended: float | None = None

    @property
    def seconds(self) -> float:
        """Since this step began, engine load counted."""
        return time.monotonic() - self._created

    @property
    def capture_seconds(self) -> float:
        """From the first loaded engine to the last finished shard."""
        return (self._ended or time.monotonic()) - self._started if self._started is not None else 0.0

    def begin(self) -> None:
        """Engines are being started."""
        self._report("loading the engine", force=True)

    def on_loaded(self) -> None:
        """An engine is loaded."""
        if self._started is None:
            self._started = time.monotonic()

    def on_tokens(self, count: int) -> None:
        """Count captured tokens and report."""
        self.captured_tokens += count
        stored = format_bytes(self._done_bytes)
        of_all = format_bytes(self._bytes)
        self._report(f"{self._num_done} of {self._num_shards} shards, {stored} of {of_all}")

    def was_there(self, shard: PlannedShard) -> None:
        """A shard was made before this step."""
        self._there += self._num_tokens(shard)
        self._num_done += 1
        self._done_bytes += shard.bytes

    def was_lost(self, shard: PlannedShard) -> None:
        """A shard that was counted turned out damaged."""
        self._there -= self._num_tokens(shard)
        self._num_done -= 1
        self._done_bytes -= shard.bytes

    def shard_done(self, shard: PlannedShard) -> None:
        """A shard was finished while this step worked."""
        self.num_new_shards += 1
        self._num_done += 1
        self._done_bytes += shard.bytes
        self._ended = time.monotonic()
        logger.info("%s done (%d of %d)", shard.file_name, self._num_done, self._num_shards)

    def end(self, result: ExtractResult) -> None:
        """The capture is complete: the last event, which has no tokens of quarantined samples."""
        message = f"{result.num_shards} of {result.num_shards} shards, {format_bytes(result.bytes)}"
        metrics = {"tokens_per_second": result.tokens_per_second} if result.tokens_per_second else {}
        self._progress(result.num_tokens, result.num_tokens, "tokens", message, force=True, **metrics)

    def _report(self, message: str, force: bool = False) -> None:
        metrics: dict[str, float] = {}
        if self.captured_tokens > 0 and self.capture_seconds > 0:
            speed = self.captured_tokens / self.capture_seconds
            left = self._total - self._there - self.captured_tokens
            metrics |= {"tokens_per_second": speed, "seconds_left": max(0.0, left / speed)}
        done = min(self._total, self._there + self.captured_tokens)
        self._progress(done, self._total, "tokens", message, force=force, **metrics)

    def _num_tokens(self, shard: PlannedShard) -> int:
        return sum(len(sample) for sample in self._samples[shard.start : shard.end])


def _backlog(config: RunConfig, staging: Staging) -> Backlog | None:
    if config.object_root is None:
        return None
    return Backlog(staging.capture_folder, int(config.object_store.upload_backlog_bytes))


def _check_counts(
    job: CaptureJob, shard: PlannedShard, samples: Sequence[Sample], entry: FileEntry | None
) -> None:
    """Hold a shard's manifest entry against the plan, quarantined samples left out.

    Raises:
        CaptureError: it is missing or holds other counts or bytes.
    """
    left_out = entry.facts.get("quarantined", {}) if entry else {}
    wanted = [sample for sample in samples[shard.start : shard.end] if sample.key not in left_out]
    planned = {
        "num_samples": len(wanted),
        "num_tokens": sum(map(len, wanted)),
        "state_bytes": sum(map(job.layout.sample_bytes, wanted)),
    }
    found = {name: entry.facts.get(name) for name in planned} if entry else None
    if found != planned:
        raise CaptureError(f"{shard.file_name} holds {found}", expected=str(planned))
