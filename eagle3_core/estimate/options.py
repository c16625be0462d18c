"""What would make a run fit: each change is tried on the same figures as the run itself."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
from pydantic import ByteSize

from eagle3_core.artifacts import ArtifactKind
from eagle3_core.capture.job import MAX_SHARDS_IN_FLIGHT
from eagle3_core.config import RunConfig
from eagle3_core.errors import Eagle3Error
from eagle3_core.estimate.case import Case, SpaceOption
from eagle3_core.estimate.space import FileSystemEstimate, Made
from eagle3_core.host.inspect import GIB, free_disk_bytes
from eagle3_core.host.run_folder import used_by_runs
from eagle3_core.host.volume import volume_of
from eagle3_core.sections import RetentionConfig
from eagle3_core.store.collect import collect_garbage

BEFORE_CAPTURE: tuple[ArtifactKind, ...] = ("conversations", "dataset", "vocabulary")
MIN_LIMIT = 4
EXAMPLE_BUCKET = "s3://bucket/prefix"


def space_options(case: Case, lacking: FileSystemEstimate) -> list[SpaceOption]:
    """Changes that lower the need on a file system that is too small: those that suffice first, and of
    these the one that changes least.

    Args:
        case: the run.
        lacking: the file system.
    """
    makers: tuple[Callable[[Case, FileSystemEstimate], Iterator[SpaceOption]], ...] = (
        _collect, _fewer_checkpoints, _smaller_cache, _smaller_backlog, _fewer_final_states, _other_disk,
        _bucket, _fewer_samples, _smaller_reserve,
    )  # fmt: skip
    found = [option for make in makers for option in make(case, lacking)]
    return sorted(found, key=lambda option: option.lacking_bytes > 0)


def _collect(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """What garbage collection and an empty trash would free; what this run uses stays."""
    store, config = case.plan.store, case.config
    if config.object_root is not None or volume_of(store.root).key != lacking.key:
        return
    policy, flags = config.retention, ""
    if not policy.names_something:
        policy, flags = RetentionConfig(unreferenced=True, keep=policy.keep), " --unreferenced"
    used = {one.ref: "this run uses it" for one in case.made.values() if one.ref}
    try:
        report = collect_garbage(
            store,
            policy,
            purge_after_days=0.0,
            dry_run=True,
            also_in_use=used | used_by_runs(config.workspace_path),
        )
    except Eagle3Error:
        return
    freed = report.trashed_bytes + report.purged_bytes
    if freed:
        left = max(0, lacking.lacking_bytes - freed)
        change = f"`eagle3 gc{flags}` and `eagle3 gc --purge` free {freed:,} bytes"
        yield SpaceOption(change=change, need_bytes=lacking.need_bytes, lacking_bytes=left)


def _fewer_checkpoints(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """One resumable checkpoint while training goes on; what comes out stays the same."""
    train = case.config.train
    if train.keep_last > 1:
        changed = case.config.model_copy(update={"train": train.model_copy(update={"keep_last": 1})})
        yield from _tried("train.keep_last=1", replace(case, config=changed), lacking)


def _smaller_reserve(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """Less that must stay free, where the run itself fits."""
    left = lacking.reserve_bytes - lacking.lacking_bytes
    if left >= 0:
        change = f"limits.min_free_disk_gib={math.floor(left / GIB * 1000) / 1000:g}"
        yield SpaceOption(change=change, need_bytes=lacking.need_bytes, lacking_bytes=0)


def _smaller_cache(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """The largest cache of samples that fits."""
    config = case.config
    size = int(config.object_store.cache_bytes)
    smaller = max(0, min(size, case.sizes()["capture"].final) - lacking.lacking_bytes)
    if config.object_root is None or smaller >= size:
        return
    store = config.object_store.model_copy(update={"cache_bytes": ByteSize(smaller)})
    changed = replace(case, config=config.model_copy(update={"object_store": store}))
    yield from _tried(f"object_store.cache_bytes={smaller}", changed, lacking)


def _smaller_backlog(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """Fewer bytes that wait for their upload; then smaller shards too."""
    config = case.config
    if config.object_root is None:
        return
    backlog = int(config.object_store.upload_backlog_bytes)
    smaller = max(0, backlog - lacking.lacking_bytes)
    store = config.object_store.model_copy(update={"upload_backlog_bytes": ByteSize(smaller)})
    changed = config.model_copy(update={"object_store": store})
    if smaller < backlog:
        yield from _tried(
            f"object_store.upload_backlog_bytes={smaller}", replace(case, config=changed), lacking
        )
    shard = int(config.capture.shard_bytes)
    over = max(0, lacking.lacking_bytes - (backlog - smaller)) // MAX_SHARDS_IN_FLIGHT
    if 0 < over < shard:
        capture = config.capture.model_copy(update={"shard_bytes": ByteSize(shard - over - 1)})
        again = _forget(case, changed.model_copy(update={"capture": capture}), BEFORE_CAPTURE)
        what = f"object_store.upload_backlog_bytes={smaller} and capture.shard_bytes={shard - over - 1}"
        yield from _tried(what, again, lacking)


def _fewer_final_states(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """Final states of the rows that a loss reads, instead of all."""
    if case.config.capture.final_state != "all":
        return
    capture = case.config.capture.model_copy(update={"final_state": "loss_rows"})
    changed = _forget(case, case.config.model_copy(update={"capture": capture}), BEFORE_CAPTURE)
    yield from _tried("capture.final_state=loss_rows", changed, lacking)


def _other_disk(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """The file system of this host with the most free space, for the store alone."""
    mounts = [Path(part.mountpoint) for part in psutil.disk_partitions(all=False)]
    others = [m for m in mounts if os.access(m, os.W_OK) and m.is_dir() and volume_of(m).key != lacking.key]
    if not others or case.config.object_root is not None:
        return
    roomy = max(others, key=free_disk_bytes)
    changed = _forget(case, case.config.model_copy(update={"store": str(roomy / "eagle3-store")}), ())
    if all(one.fits for one in changed.file_systems() if one.key != lacking.key):
        free = free_disk_bytes(roomy)
        yield from _tried(f"store={roomy / 'eagle3-store'} ({free:,} bytes free there)", changed, lacking)


def _bucket(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """An object store, with the cache that still fits."""
    if case.config.object_root is not None:
        return
    changed = _forget(case, case.config.model_copy(update={"store": EXAMPLE_BUCKET}), ())
    options = list(_tried(f"store={EXAMPLE_BUCKET}", changed, lacking))
    now = _on(changed, lacking)
    if now is not None and not now.fits:
        for smaller in _smaller_cache(changed, now):
            change = f"store={EXAMPLE_BUCKET} with {smaller.change}"
            options.append(smaller.model_copy(update={"change": change}))
    yield from options


def _fewer_samples(case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """The largest `limit` that fits."""
    fewest, most = MIN_LIMIT, len(case.load.rows)
    config = case.config

    def limited(count: int) -> Case:
        changed = _forget(case, config.model_copy(update={"limit": count}), ())
        return replace(changed, load=case.load.head(count))

    if config.data.capture is not None or most <= fewest or not _fits(limited(fewest), lacking):
        return
    while most - fewest > 1:
        middle = (fewest + most) // 2
        fewest, most = (middle, most) if _fits(limited(middle), lacking) else (fewest, middle)
    yield from _tried(f"`--limit {fewest}` (of {len(case.load.rows):,} samples)", limited(fewest), lacking)


def _forget(case: Case, config: RunConfig, kept: tuple[ArtifactKind, ...]) -> Case:
    """The case with other settings, under which only the kept kinds keep their identity."""
    made: dict[ArtifactKind, Made] = {kind: case.made[kind] for kind in kept if kind in case.made}
    return replace(case, config=config, made=made)


def _on(case: Case, lacking: FileSystemEstimate) -> FileSystemEstimate | None:
    return next((one for one in case.file_systems() if one.key == lacking.key), None)


def _fits(case: Case, lacking: FileSystemEstimate) -> bool:
    found = _on(case, lacking)
    return found is None or found.fits


def _tried(change: str, case: Case, lacking: FileSystemEstimate) -> Iterator[SpaceOption]:
    """The option, if it lowers the need at all."""
    found = _on(case, lacking)
    need = found.need_bytes if found else 0
    if need < lacking.need_bytes:
        left = found.lacking_bytes if found else 0
        yield SpaceOption(change=change, need_bytes=need, lacking_bytes=left)
