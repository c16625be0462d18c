"""The step `extract`: captures the target's hidden states of a dataset into shards.

Goes on where an interrupted session stopped: shards that are in the manifest and match their hash are left
alone, the others are made again, in one engine session; with none missing no engine is started.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.job import CaptureJob, capture_layout, check_plan, close_session, open_session
from eagle3_core.config import RunConfig
from eagle3_core.contracts import ExtractResult, StepSpec
from eagle3_core.errors import CaptureError
from eagle3_core.step import Progress
from eagle3_core.store.dataset import Sample, read_dataset
from eagle3_core.store.files import file_problem
from eagle3_core.store.local import ArtifactWriter, LocalStore
from eagle3_core.store.shards import PlannedShard, plan_shards
from eagle3_core.target.info import TargetInfo, inspect_target

logger = logging.getLogger(__name__)


def run(spec: StepSpec, progress: Progress) -> ExtractResult:
    """Capture what is missing and complete the capture.

    Raises:
        CaptureError: no samples, a plan made for something else, no room, or an engine that did not return
            what was asked for.
        TargetError: auxiliary layer ids that the target does not have.
    """
    config = spec.config
    info = inspect_target(Path(spec.target_path))
    layout = capture_layout(config, info)
    store = LocalStore(config.store_path)
    dataset = spec.inputs["dataset"]
    store.read(dataset)
    samples = read_dataset(store.folder(dataset))
    plan = spec.outputs["capture"]
    check_plan(plan, samples, layout, info)
    shards = plan_shards(samples, layout, int(config.capture.shard_bytes))
    with store.writer(plan, spec.run_id) as writer:
        job = CaptureJob(
            engine=str(plan.identity.get("engine", config.capture.engine)),
            dataset_folder=str(store.folder(dataset)),
            folder=str(writer.folder),
            layout=layout,
            shards=tuple(shard for shard in shards if shard.file_name not in writer.files),
        )
        job = _adopt_finished(job, writer)
        session = _Session(progress, shards, samples, job.shards)
        for shard, entry in _captured(config, info, job, samples, session):
            writer.record(entry, seconds=session.seconds)
            session.shard_done(shard)
        result = _result(shards, samples, writer, session)
        close_session(job)
        writer.complete(seconds=session.seconds, result=result.model_dump(mode="json"))
    return result


class _Session:
    """Counts and clock of this step; the clock starts when the engine is loaded."""

    def __init__(
        self,
        progress: Progress,
        shards: Sequence[PlannedShard],
        samples: Sequence[Sample],
        missing: Sequence[PlannedShard],
    ) -> None:
        self._progress, self._num_shards = progress, len(shards)
        self.num_new_shards = 0
        self.captured_tokens = 0
        self._total = sum(map(len, samples))
        self._to_capture = sum(_num_tokens(shard, samples) for shard in missing)
        self._shards_there = len(shards) - len(missing)
        self._created, self._started = time.monotonic(), None
        self._ended: float | None = None
        progress(self._total - self._to_capture, self._total, "tokens", "loading the engine", force=True)

    _started: float | None

    @property
    def seconds(self) -> float:
        """Since this step began, engine load counted."""
        return time.monotonic() - self._created

    @property
    def capture_seconds(self) -> float:
        """From the loaded engine to the last finished shard."""
        return (self._ended or time.monotonic()) - self._started if self._started is not None else 0.0

    def on_tokens(self, count: int) -> None:
        """Count captured tokens and report."""
        if self._started is None:
            self._started = time.monotonic()
        self.captured_tokens += count
        elapsed = self.capture_seconds
        if not self.captured_tokens or not elapsed:
            return
        speed = self.captured_tokens / elapsed
        self._progress(
            self._total - self._to_capture + self.captured_tokens,
            self._total,
            "tokens",
            f"{self._shards_there + self.num_new_shards} of {self._num_shards} shards",
            tokens_per_second=speed,
            seconds_left=(self._to_capture - self.captured_tokens) / speed,
        )

    def shard_done(self, shard: PlannedShard) -> None:
        """Count a finished shard."""
        self.num_new_shards += 1
        self._ended = time.monotonic()
        logger.info(
            "%s done (%d of %d)", shard.file_name, self._shards_there + self.num_new_shards, self._num_shards
        )


def _adopt_finished(job: CaptureJob, writer: ArtifactWriter) -> CaptureJob:
    """Record shards that an interrupted session had finished but not yet recorded."""
    if not job.shards and not job.session.exists():
        return job
    for name, entry in open_session(job).items():
        if entry.path == name and file_problem(writer.folder, entry) is None:
            writer.record(entry)
    missing = tuple(shard for shard in job.shards if shard.file_name not in writer.files)
    return job.model_copy(update={"shards": missing})


def _captured(
    config: RunConfig, info: TargetInfo, job: CaptureJob, samples: Sequence[Sample], session: _Session
) -> Iterator[tuple[PlannedShard, FileEntry]]:
    """The engine's finished shards; no engine is imported when there is nothing to do."""
    if not job.shards:
        logger.info("all shards are there already")
        return
    _check_room(job, config)
    logger.info("capturing %d shards with %s", len(job.shards), job.engine)
    if config.capture.engine == "reference":
        from eagle3_core.capture.reference import capture_with_reference

        yield from capture_with_reference(config, info, job, samples, session.on_tokens)
    else:
        from eagle3_core.capture.vllm_engine import capture_with_vllm

        yield from capture_with_vllm(config, info, job, samples, session.on_tokens)


def _check_room(job: CaptureJob, config: RunConfig) -> None:
    needed = sum(shard.bytes for shard in job.shards)
    reserve = int(config.limits.min_free_disk_gib * 2**30)
    free = shutil.disk_usage(job.folder).free
    if free < needed + reserve:
        raise CaptureError(
            f"{job.folder} has {free:,} bytes free",
            expected=f"{needed:,} for the missing shards and {reserve:,} that must stay free",
            remedy="make room, or lower limits.min_free_disk_gib",
        )


def _result(
    shards: Sequence[PlannedShard], samples: Sequence[Sample], writer: ArtifactWriter, session: _Session
) -> ExtractResult:
    """Counts of the whole capture, checked against the plan.

    Raises:
        CaptureError: a shard is missing or holds other counts or bytes than planned.
    """
    for shard in shards:
        entry = writer.files.get(shard.file_name)
        planned = {
            "num_samples": shard.end - shard.start,
            "num_tokens": _num_tokens(shard, samples),
            "state_bytes": shard.bytes,
        }
        found = {name: entry.facts.get(name) for name in planned} if entry else None
        if found != planned:
            raise CaptureError(f"{shard.file_name} holds {found}", expected=str(planned))
    seconds = session.capture_seconds
    return ExtractResult(
        num_shards=len(shards),
        num_new_shards=session.num_new_shards,
        num_samples=len(samples),
        num_tokens=sum(map(len, samples)),
        bytes=sum(entry.bytes for entry in writer.files.values()),
        captured_tokens=session.captured_tokens,
        seconds=seconds,
        tokens_per_second=session.captured_tokens / seconds if session.captured_tokens and seconds else None,
    )


def _num_tokens(shard: PlannedShard, samples: Sequence[Sample]) -> int:
    return sum(len(sample) for sample in samples[shard.start : shard.end])
