"""Which bytes of a run lie on which file system, and at most how many at once.

Stages run one after the other, and each keeps what the earlier ones made. So the most that a file system
must hold is, over all stages, what the earlier ones leave there and what this one has there at its peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactKind, ArtifactRef
from eagle3_core.capture.job import MAX_SHARDS_IN_FLIGHT
from eagle3_core.config import STAGES, RunConfig, Stage
from eagle3_core.estimate.sizes import ENTRY_BYTES, Size
from eagle3_core.host.inspect import GIB, free_disk_bytes
from eagle3_core.host.volume import volume_of
from eagle3_core.planning import MAKING_STAGE
from eagle3_core.store.files_ahead import NUM_FILES
from eagle3_core.store.reserve import Reservations
from eagle3_core.store.tree import folder_bytes

RUN_FOLDER_BYTES = 160_000
"""Configuration, specs, logs, summary and report of a run with all stages."""
CLAIM_BYTES = 4096
SAMPLE_CACHE = ("cache", "samples")


class SpaceItem(BaseModel):
    """Bytes that one thing has yet to take on one file system."""

    model_config = ConfigDict(frozen=True)
    what: str = Field(description="An artifact (`KIND/ID`, or its kind while the id is not known) or a role.")
    stage: Stage = Field(description="That writes it.")
    path: str = Field(description="Folder.")
    bytes: int = Field(description="That stay after the stage.")
    peak_bytes: int = Field(description="At most while the stage runs.")


class FileSystemEstimate(BaseModel):
    """What a run needs of one file system."""

    model_config = ConfigDict(frozen=True)
    key: str
    mount: str
    items: tuple[SpaceItem, ...]
    new_bytes: int = Field(description="That the run leaves there.")
    need_bytes: int = Field(description="At most that it takes there at any time.")
    free_bytes: int
    reserve_bytes: int = Field(description="Must stay free: limits.min_free_disk_gib.")
    reserved: dict[str, int] = Field(description="Bytes that other runs of this host have yet to write.")

    @property
    def lacking_bytes(self) -> int:
        """Bytes by which the run does not fit; 0 if it does."""
        reserved = sum(self.reserved.values())
        return max(0, self.need_bytes + self.reserve_bytes + reserved - self.free_bytes)

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return self.lacking_bytes == 0


class Made(BaseModel):
    """What the store has of an artifact that a run makes."""

    model_config = ConfigDict(frozen=True)
    ref: ArtifactRef | None = None
    state: str = "missing"
    bytes: int = 0


def space_items(
    config: RunConfig,
    sizes: Mapping[ArtifactKind, Size],
    made: Mapping[ArtifactKind, Made],
    wanted: Collection[Stage],
    shard_bytes: int,
    event_bytes: int = 0,
) -> list[SpaceItem]:
    """Everything that the wanted stages have yet to write on this host.

    Args:
        config: the run's.
        sizes: of all artifacts.
        made: what is there already; kinds that are absent are missing.
        wanted: stages.
        shard_bytes: of the largest shard.
        event_bytes: of TensorBoard's files.
    """
    root, workspace = config.store_path, config.workspace_path
    items = []
    for kind, size in sizes.items():
        there, stage = made.get(kind, Made()), MAKING_STAGE[kind]
        if stage not in wanted or there.state == "complete":
            continue
        what = str(there.ref) if there.ref else kind
        folder = root / kind / there.ref.id if there.ref else root / kind
        if kind == "capture" and config.object_root is not None:
            items += _remote_capture(config, what, folder, size.final - there.bytes, shard_bytes)
            continue
        left, peak = max(0, size.final - there.bytes), max(0, size.peak - there.bytes)
        items.append(SpaceItem(what=what, stage=stage, path=str(folder), bytes=left, peak_bytes=peak))
        if kind == "capture":
            staged = (CLAIM_BYTES + ENTRY_BYTES) * MAX_SHARDS_IN_FLIGHT
            path = str(root / "staging")
            items.append(SpaceItem(what="staging", stage=stage, path=path, bytes=0, peak_bytes=staged))
    if config.object_root is not None:
        items += _remote_readers(config, sizes["capture"].final, wanted, shard_bytes)
    path = str(workspace / "runs")
    log = RUN_FOLDER_BYTES
    items.append(SpaceItem(what="logs and report", stage="report", path=path, bytes=log, peak_bytes=log))
    if event_bytes and "train" in wanted and made.get("checkpoint", Made()).state != "complete":
        name = "TensorBoard files"
        items.append(
            SpaceItem(what=name, stage="train", path=path, bytes=event_bytes, peak_bytes=event_bytes)
        )
    return items


def file_systems(
    config: RunConfig, items: Iterable[SpaceItem], run_id: str | None = None, same: Collection[str] = ()
) -> list[FileSystemEstimate]:
    """The file systems that the items lie on, with what is free there.

    Args:
        config: the run's.
        items: what is to be written.
        run_id: whose reservation is the run's own.
        same: artifacts of the run, which another run that makes them too has reserved already.
    """
    by_key: dict[str, list[SpaceItem]] = {}
    mounts = {}
    for item in items:
        volume = volume_of(Path(item.path))
        mounts[volume.key] = volume
        by_key.setdefault(volume.key, []).append(item)
    reservations = Reservations(config.limits.reservations)
    return [
        FileSystemEstimate(
            key=key,
            mount=str(mounts[key].mount),
            items=tuple(found),
            new_bytes=sum(item.bytes for item in found),
            need_bytes=peak_bytes(found),
            free_bytes=free_disk_bytes(Path(found[0].path)),
            reserve_bytes=round(config.limits.min_free_disk_gib * GIB),
            reserved=reservations.others(run_id, mounts[key], frozenset(same)),
        )
        for key, found in by_key.items()
    ]


def peak_bytes(items: Iterable[SpaceItem]) -> int:
    """The most that these items take at once."""
    listed = list(items)
    kept = most = 0
    for stage in STAGES:
        now = [item for item in listed if item.stage == stage]
        most = max(most, kept + sum(item.peak_bytes for item in now))
        kept += sum(item.bytes for item in now)
    return most


def _remote_capture(
    config: RunConfig, what: str, folder: Path, left: int, shard_bytes: int
) -> list[SpaceItem]:
    """Of a capture that goes into a bucket: shards in work, and those that wait for their upload."""
    backlog = int(config.object_store.upload_backlog_bytes) + MAX_SHARDS_IN_FLIGHT * shard_bytes
    peak = max(0, min(left, backlog))
    name = f"{what} on its way to {config.object_root}"
    return [SpaceItem(what=name, stage="extract", path=str(folder), bytes=0, peak_bytes=peak)]


def _remote_readers(
    config: RunConfig, capture: int, wanted: Collection[Stage], shard_bytes: int
) -> list[SpaceItem]:
    """What reading a capture from a bucket takes: shards that are verified, and the cache of samples."""
    items = []
    if "verify" in wanted:
        path = str(config.store_path / "scratch")
        peak = min(capture, NUM_FILES * shard_bytes)
        items.append(SpaceItem(what="shards to verify", stage="verify", path=path, bytes=0, peak_bytes=peak))
    if "train" in wanted:
        folder = config.workspace_path.joinpath(*SAMPLE_CACHE)
        size = max(0, min(capture, int(config.object_store.cache_bytes)) - folder_bytes(folder))
        items.append(
            SpaceItem(what="sample cache", stage="train", path=str(folder), bytes=size, peak_bytes=size)
        )
    return items
