"""What one engine session may be given to capture, and the folder through which its worker answers.

The worker that holds the states may be another process than the driver. It gets a `CaptureJob` as JSON,
writes shards into the session's folder, and beside each finished shard leaves its manifest entry; only the
step publishes them in the capture, so a worker that outlives its session can harm nothing. A failure of the
worker is left there too, so that the driver can stop and say why.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactPlan, FileEntry
from eagle3_core.capture.journal import JOURNAL_NAME, Journal
from eagle3_core.config import RunConfig
from eagle3_core.errors import EXIT_USER_ERROR, CaptureError, DiskFullError, Eagle3Error
from eagle3_core.sections import LimitsConfig
from eagle3_core.store.dataset import Sample, content_hash
from eagle3_core.store.disk import MAKE_ROOM, DiskGuard, is_no_space
from eagle3_core.store.files import write_atomic
from eagle3_core.store.shards import PlannedShard, ShardLayout
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import final_layer_id, resolve_aux_layer_ids

FAILURE_NAME = "failure.json"
SPARE_FAILURE_NAME = "failure.spare"
PAUSED_NAME = "paused"
ASK_AGAIN_SECONDS = 1.0
NO_SPACE = "no space: a write of the capture found the disk full"
MAX_SHARDS_IN_FLIGHT = 3
"""Shards in host memory at once: one being written, one being finished, one being begun."""


class Later(enum.Enum):
    """The answer where no shard may be begun now: finish what is in flight, then ask again."""

    LATER = "later"


LATER = Later.LATER


class EngineEndedError(CaptureError):
    """The engine died under its driver: another engine may do better."""


class CaptureJob(BaseModel):
    """The shards that an engine session may be given, and how their samples are to be sent."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    engine: str = Field(description="Name and version, for messages.")
    dataset_folder: str = Field(description="Folder of the dataset artifact: ids, masks and keys.")
    folder: str = Field(description="Folder of the session: finished shards, their entries, its journal.")
    layout: ShardLayout
    shards: tuple[PlannedShard, ...] = Field(description="In the order of the dataset.")
    with_sha256: bool = Field(default=False, description="Record a SHA-256 of each shard too.")
    left_out: tuple[str, ...] = Field(default=(), description="Keys of quarantined samples.")
    alone: tuple[str, ...] = Field(
        default=(), description="Keys that are sent first, one at a time with nothing else in flight."
    )

    limits: LimitsConfig = Field(
        default=LimitsConfig(min_free_disk_gib=0, on_full_disk="fail"), description="What a full disk means."
    )
    run_id: str | None = Field(default=None, description="Whose reservation of space is the session's own.")

    @property
    def guard(self) -> DiskGuard:
        """Waits for space in the session's processes, and says so in its folder."""
        return DiskGuard(self.limits, self.run_id, self._tell_pause)

    def paused(self) -> str | None:
        """Why the session's writers wait, or None."""
        try:
            return (Path(self.folder) / PAUSED_NAME).read_text() or NO_SPACE
        except FileNotFoundError:
            return None

    def prepare_folder(self) -> None:
        """Leave a failure in the folder that a full disk can only rename."""
        reason = {"kind": DiskFullError.__name__, "found": NO_SPACE, "expected": None, "remedy": MAKE_ROOM}
        write_atomic(Path(self.folder) / SPARE_FAILURE_NAME, json.dumps(reason))

    @property
    def capture_ids(self) -> tuple[int, ...]:
        """Auxiliary capture ids and the final one, increasing: the order of an engine's rows."""
        return (*self.layout.aux_layer_ids, self.layout.final_layer_id)

    @property
    def journal(self) -> Journal:
        """Where the session notes which samples the engine is computing."""
        return Journal(Path(self.folder) / JOURNAL_NAME)

    def samples_of(self, shard: PlannedShard, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of a shard, in order, without quarantined ones.

        Args:
            shard: one of the job's.
            samples: all samples of the dataset.
        """
        left_out = set(self.left_out)
        return [sample for sample in samples[shard.start : shard.end] if sample.key not in left_out]

    def entry_path(self, shard: PlannedShard) -> Path:
        """The side file that holds a finished shard's manifest entry."""
        return Path(self.folder) / f"{Path(shard.file_name).stem}.entry.json"

    def finished_entry(self, shard: PlannedShard) -> FileEntry | None:
        """The manifest entry of a shard that the worker has finished, or None."""
        try:
            return FileEntry.model_validate_json(self.entry_path(shard).read_bytes())
        except FileNotFoundError:
            return None

    def record_failure(self, error: Exception) -> None:
        """Leave the reason for which the worker cannot go on; the first one stays.

        Where not even that can be written, as on a full disk, the reason is printed and this process ends:
        a driver that hears nothing would wait for shards that never come.
        """
        path = Path(self.folder) / FAILURE_NAME
        if not path.exists():
            if not isinstance(error, Eagle3Error):
                error = Eagle3Error(f"{type(error).__name__}: {error}")
            reason = {"found": error.found, "expected": error.expected, "remedy": error.remedy}
            try:
                write_atomic(path, json.dumps({"kind": type(error).__name__, **reason}))
            except OSError as unwritten:
                if is_no_space(unwritten) and self._use_spare(path):
                    return
                print(f"capture failed: {error} (and cannot write {path}: {unwritten})", flush=True)
                os._exit(EXIT_USER_ERROR)

    def raise_failure(self) -> None:
        """Raise what the worker recorded, if anything.

        Raises:
            CaptureError: with the worker's own words.
            DiskFullError: its disk was full.
        """
        path = Path(self.folder) / FAILURE_NAME
        if path.exists():
            raise session_error(**json.loads(path.read_text()))

    def _tell_pause(self, reason: str | None) -> None:
        path = Path(self.folder) / PAUSED_NAME
        if reason is None:
            path.unlink(missing_ok=True)
        elif not path.exists():
            with contextlib.suppress(OSError):  # an empty file, all that a full disk takes, says it too
                path.write_text(reason)

    def _use_spare(self, path: Path) -> bool:
        try:
            path.with_name(SPARE_FAILURE_NAME).rename(path)
        except OSError:
            return False
        return True


def session_error(
    kind: str, found: str, expected: str | None, remedy: str | None
) -> CaptureError | DiskFullError:
    """The error that a session's process met, of the class that decides what it means here."""
    known = DiskFullError if kind == DiskFullError.__name__ else CaptureError
    return known(found, expected=expected, remedy=remedy)


def capture_layout(config: RunConfig, info: TargetInfo) -> ShardLayout:
    """What a capture of this target stores.

    Raises:
        TargetError: auxiliary ids that the target does not have.
    """
    return ShardLayout(
        aux_layer_ids=resolve_aux_layer_ids(config.target.aux_layer_ids, info.num_layers),
        final_layer_id=final_layer_id(info.num_layers),
        hidden_size=info.hidden_size,
        dtype=config.target.dtype,
        final_state=config.capture.final_state,
    )


def check_plan(plan: ArtifactPlan, samples: Sequence[Sample], layout: ShardLayout, info: TargetInfo) -> None:
    """Refuse a capture whose plan was made for other samples, layers or another target.

    Raises:
        CaptureError: no samples, keys that are not unique, or one line for each difference.
    """
    if not samples:
        raise CaptureError("the dataset has no samples", remedy="run the prepare stage on more prompts")
    repeated = _first_repeated(sample.key for sample in samples)
    if repeated is not None:
        raise CaptureError(f"the dataset has more than one sample with the key {repeated!r}")
    found = {
        "content": content_hash(samples),
        "aux_layer_ids": list(layout.aux_layer_ids),
        "final_layer_id": layout.final_layer_id,
        "final_state": layout.final_state,
        "dtype": layout.dtype,
        "target": info.fingerprint,
    }
    differences = [
        f"{key} {plan.identity.get(key)} (now {value})"
        for key, value in found.items()
        if plan.identity.get(key) != value
    ]
    if differences:
        raise CaptureError(
            f"{plan.ref} was planned with {', '.join(differences)}",
            remedy="plan the run again: another identity gets a folder of its own",
        )


def _first_repeated(keys: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None


def check_positions(info: TargetInfo, longest: int, margin: int) -> None:
    """Refuse samples for which a target has too few positions.

    Args:
        info: the target.
        longest: tokens of the longest sample.
        margin: tokens that the engine needs beyond them.

    Raises:
        CaptureError: names both numbers.
    """
    limit = info.max_position_embeddings
    if limit is not None and longest + margin > limit:
        raise CaptureError(
            f"the longest sample has {longest:,} tokens and the target {limit:,} positions",
            remedy=f"set data.max_length to at most {limit - margin}",
        )


def iter_take(shards: Iterable[PlannedShard]) -> Callable[[], PlannedShard | None]:
    """A `take` for an engine: gives the shards in order, then None."""
    waiting = iter(shards)
    return lambda: next(waiting, None)


def wait_take(take: Callable[[], PlannedShard | Later | None]) -> Callable[[], PlannedShard | None]:
    """A `take` for an engine that has nothing in flight when it asks: it waits until it may go on."""

    def patient() -> PlannedShard | None:
        while isinstance(shard := take(), Later):
            time.sleep(ASK_AGAIN_SECONDS)
        return shard

    return patient
