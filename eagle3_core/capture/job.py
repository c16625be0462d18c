"""What one engine session has to capture, and the folder through which its worker answers.

The worker that holds the states may be another process than the step (the driver). It gets a `CaptureJob` as
JSON, writes shards into the capture's folder, and for each finished shard leaves its manifest entry in the
session folder; the driver, which holds the capture's lock, is the only one that writes the manifest. A
failure of the worker is left there too, so that the driver can stop and say why.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactPlan, FileEntry
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError, Eagle3Error
from eagle3_core.store.dataset import Sample, content_hash
from eagle3_core.store.files import LOCK_NAME, folder_lock, write_atomic
from eagle3_core.store.shards import PlannedShard, ShardLayout
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import final_layer_id, resolve_aux_layer_ids

SESSION_FOLDER = "session"
FAILURE_NAME = "failure.json"
MAX_SHARDS_IN_FLIGHT = 3
"""Shards in host memory at once: one being written, one being finished, one being begun."""


class CaptureJob(BaseModel):
    """The missing shards of a capture, for one engine session."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    engine: str = Field(description="Name and version, for messages.")
    dataset_folder: str = Field(description="Folder of the dataset artifact: ids, masks and keys.")
    folder: str = Field(description="Folder of the capture artifact.")
    layout: ShardLayout
    shards: tuple[PlannedShard, ...] = Field(description="In the order in which they are captured.")

    @property
    def session(self) -> Path:
        """Where worker and driver meet; not part of the artifact."""
        return Path(self.folder) / SESSION_FOLDER

    @property
    def capture_ids(self) -> tuple[int, ...]:
        """Auxiliary capture ids and the final one, increasing: the order of an engine's rows."""
        return (*self.layout.aux_layer_ids, self.layout.final_layer_id)

    def entry_path(self, shard: PlannedShard) -> Path:
        """The side file that holds a finished shard's manifest entry."""
        return self.session / f"{Path(shard.file_name).stem}.entry.json"

    def finished_entry(self, shard: PlannedShard) -> FileEntry | None:
        """The manifest entry of a shard that the worker has finished, or None."""
        try:
            return FileEntry.model_validate_json(self.entry_path(shard).read_bytes())
        except FileNotFoundError:
            return None

    def record_failure(self, error: Exception) -> None:
        """Leave the reason for which the worker cannot go on; the first one stays."""
        path = self.session / FAILURE_NAME
        if not path.exists():
            if not isinstance(error, Eagle3Error):
                error = Eagle3Error(f"{type(error).__name__}: {error}")
            reason = {"found": error.found, "expected": error.expected, "remedy": error.remedy}
            write_atomic(path, json.dumps(reason))

    def raise_failure(self) -> None:
        """Raise what the worker recorded, if anything.

        Raises:
            CaptureError: with the worker's own words.
        """
        path = self.session / FAILURE_NAME
        if path.exists():
            reason = json.loads(path.read_text())
            raise CaptureError(reason["found"], expected=reason["expected"], remedy=reason["remedy"])


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


def open_session(job: CaptureJob) -> dict[str, FileEntry]:
    """Empty the session folder and return the entries of shards that an interrupted session had finished.

    The worker holds the session folder's lock, so a worker that outlived its step is found here.

    Raises:
        StoreError: an earlier engine process is still writing.
    """
    with folder_lock(job.session):
        finished = {shard.file_name: job.finished_entry(shard) for shard in job.shards}
        for path in job.session.iterdir():
            if path.name != LOCK_NAME:
                path.unlink()
    return {name: entry for name, entry in finished.items() if entry is not None}


def close_session(job: CaptureJob) -> None:
    """Remove the session folder of a finished capture."""
    shutil.rmtree(job.session, ignore_errors=True)


def _first_repeated(keys: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for key in keys:
        if key in seen:
            return key
        seen.add(key)
    return None
