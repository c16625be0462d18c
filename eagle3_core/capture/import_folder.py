"""The step `import_capture`: makes a dataset and a capture of a folder in a foreign format.

Legend: S tokens of a sample, L stored layers, H hidden size.

Everything is checked before the first shard is written, except the states themselves, which are read once.
Samples keep the order of the rows. An interrupted import goes on with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.capture.formats.folder import ForeignFolder, ForeignText, check_text
from eagle3_core.capture.formats.names import FORMATS
from eagle3_core.capture.job import capture_layout
from eagle3_core.config import RunConfig
from eagle3_core.contracts import ExtractResult, ImportResult, ImportSpec
from eagle3_core.errors import DataError
from eagle3_core.identity import IMPORTED, plan_capture, plan_imported_dataset
from eagle3_core.step import Progress
from eagle3_core.store.dataset import DATASET_FILE, Sample, content_hash, sample_counts, write_dataset
from eagle3_core.store.files import atomic_file
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.store.shard_writer import write_shard
from eagle3_core.store.shards import CapturedSample, PlannedShard, ShardLayout, plan_shards
from eagle3_core.target.info import TargetInfo, inspect_target

logger = logging.getLogger(__name__)


def run(spec: ImportSpec, progress: Progress) -> ImportResult:
    """Import a folder.

    Raises:
        DataError: rows that are missing or there twice, or whose tokens, counts, layers or dtype do not fit.
        TargetError: layers that the target does not have.
    """
    config, info = spec.config, inspect_target(Path(spec.target_path))
    folder = FORMATS[spec.format].reader(Path(spec.folder))
    layout = capture_layout(config, info)
    check_layers(spec, folder, layout, info)
    samples = read_samples(folder, config.data.heldout_fraction, info.vocab_size)
    engine = f"{IMPORTED}{spec.format}"
    dataset = plan_imported_dataset(info, engine, content_hash(samples))
    capture = plan_capture(config, info, dataset.ref, content_hash(samples), engine)
    store = open_store(config)
    _write_dataset(store, dataset, samples)
    result = _write_capture(store, capture, folder, samples, layout, config, progress)
    return ImportResult(
        dataset=dataset.ref,
        capture=capture.ref,
        num_samples=len(samples),
        num_tokens=sum(map(len, samples)),
        num_shards=result.num_shards,
        num_new_shards=result.num_new_shards,
        bytes=result.bytes,
    )


def check_layers(spec: ImportSpec, folder: ForeignFolder, layout: ShardLayout, info: TargetInfo) -> None:
    """Compare the layers of a folder with those that the profile asks for.

    Raises:
        TargetError: the target does not have them.
        DataError: they are others.
    """
    wanted = (*layout.aux_layer_ids, layout.final_layer_id)
    translate = FORMATS[spec.format].to_capture_ids
    for named in (spec.layer_ids, folder.layer_ids):
        if named is not None and translate(named, info.num_layers) != wanted:
            raise DataError(
                f"{spec.folder} has the layers {list(named)}, capture ids "
                f"{list(translate(named, info.num_layers))}",
                expected=f"{list(wanted)} of the profile",
                remedy="set target.aux_layer_ids",
            )
    if spec.layer_ids is None and folder.layer_ids is None:
        logger.warning(
            "%s does not name its layers: taken to be the capture ids %s, which the meaning check can tell",
            spec.folder, list(wanted),
        )  # fmt: skip


def read_samples(folder: ForeignFolder, heldout_fraction: float, vocab_size: int) -> list[Sample]:
    """The dataset of a folder, in the order of its rows.

    Raises:
        DataError: a row's tokens do not fit, or a key is there twice.
    """
    texts = [folder.text(row) for row in range(folder.num_samples)]
    for text in texts:
        check_text(text, vocab_size)
    keys = [text.key or f"row-{row:07d}" for row, text in enumerate(texts)]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"the key {twice} is there more than once")
    heldout = _heldout(keys, heldout_fraction)
    return [_sample(key, text, key in heldout) for key, text in zip(keys, texts, strict=True)]


def captured(
    folder: ForeignFolder, row: int, sample: Sample, layout: ShardLayout, source: str
) -> CapturedSample:
    """The states of a row as a shard holds them.

    Raises:
        DataError: another number of layers, tokens or values than the dataset and the target say, or no final
            state where one is needed.
    """
    states = folder.states(row)
    wanted = (len(sample), len(layout.aux_layer_ids) + 1, layout.hidden_size)
    if tuple(states.shape) != wanted:
        raise DataError(
            f"{source} has states of the shape {list(states.shape)}",
            expected=f"{list(wanted)}: tokens, layers, hidden size",
        )
    dtype = str(states.dtype).removeprefix("torch.")
    if dtype != layout.dtype:
        raise DataError(f"{source} has states in {dtype}", expected=layout.dtype, remedy="set target.dtype")
    rows = torch.from_numpy(sample.final_rows(layout.final_state))
    final = states[rows, -1]
    empty = (final == 0).all(dim=1)
    if bool(empty.any()):
        raise DataError(
            f"{source} has no final state for {int(empty.sum())} rows, first for {int(rows[empty][0])}",
            remedy="set capture.final_state to loss_rows if it was exported so",
        )
    return CapturedSample(
        key=sample.key,
        input_ids=torch.from_numpy(sample.input_ids),
        loss_mask=torch.from_numpy(sample.loss_mask),
        aux_states=states[:, :-1].contiguous(),
        final_states=final,
        final_rows=rows,
    )


def _write_dataset(store: LocalStore, plan: ArtifactPlan, samples: Sequence[Sample]) -> None:
    with store.writer(plan) as writer:
        if writer.is_complete:
            return
        path = writer.folder / DATASET_FILE
        with atomic_file(path) as handle:
            write_dataset(Path(handle.name), samples)
        writer.complete(
            [path],
            num_read=len(samples),
            num_kept=len(samples),
            rejected=[],
            num_truncated=0,
            content_hash=content_hash(samples),
            **sample_counts(samples),
        )


def _write_capture(
    store: LocalStore,
    plan: ArtifactPlan,
    folder: ForeignFolder,
    samples: Sequence[Sample],
    layout: ShardLayout,
    config: RunConfig,
    progress: Progress,
) -> ExtractResult:
    started, num_new = time.monotonic(), 0
    shards = plan_shards(samples, layout, int(config.capture.shard_bytes))
    with store.writer(plan) as writer:
        for shard in shards:
            if shard.file_name not in writer.files:
                parts = _parts(folder, shard, samples, layout)
                path = writer.folder / shard.file_name
                writer.record(write_shard(path, parts, layout, config.capture.sha256))
                num_new += 1
            progress(shard.index + 1, len(shards), "shards", force=True)
        result = ExtractResult(
            num_shards=len(shards),
            num_new_shards=num_new,
            num_samples=len(samples),
            num_tokens=sum(map(len, samples)),
            bytes=sum(entry.bytes for entry in writer.files.values()),
            captured_tokens=0,
            seconds=time.monotonic() - started,
            tokens_per_second=None,
        )
        if not writer.is_complete:
            writer.complete(seconds=result.seconds, result=result.model_dump(mode="json"))
    return result


def _parts(
    folder: ForeignFolder, shard: PlannedShard, samples: Sequence[Sample], layout: ShardLayout
) -> list[CapturedSample]:
    rows = range(shard.start, shard.end)
    return [captured(folder, row, samples[row], layout, folder.source(row)) for row in rows]


def _sample(key: str, text: ForeignText, is_heldout: bool) -> Sample:
    mask = text.loss_mask.astype(np.uint8)
    starts = np.flatnonzero(np.diff(mask, prepend=np.uint8(0)) == 1)
    return Sample(
        key=key,
        kind="imported",
        split=text.split or ("heldout" if is_heldout else "train"),
        input_ids=text.input_ids.astype(np.int32),
        loss_mask=mask,
        prompt_length=int(starts[-1]) if len(starts) else len(mask),
        finish_reason="stop",
    )


def _heldout(keys: Sequence[str], fraction: float) -> set[str]:
    """The keys that are held out where a folder does not say: by a hash, so that order does not matter."""
    count = min(len(keys) - 1, max(1, round(len(keys) * fraction)))
    return set(sorted(keys, key=lambda key: hashlib.sha256(key.encode()).digest())[:count])
