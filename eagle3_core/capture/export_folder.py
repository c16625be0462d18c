"""The step `export_capture`: writes a capture as a folder in a foreign format.

Legend: S tokens of a sample, L stored layers, H hidden size.

Those formats have a final state for every row. Where the capture has one only for the rows that a loss reads,
the other rows are zeros: no loss reads them there either.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from eagle3_core.capture.formats.names import FORMATS
from eagle3_core.contracts import ExportCaptureResult, ExportCaptureSpec
from eagle3_core.errors import DataError, StoreError
from eagle3_core.step import Progress
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.open import open_store
from eagle3_core.store.shards import CapturedSample, ShardReader

logger = logging.getLogger(__name__)


def run(spec: ExportCaptureSpec, progress: Progress) -> ExportCaptureResult:
    """Write every stored sample of a complete capture; rows are numbered in the order of the dataset.

    Raises:
        DataError: the folder is not empty.
        StoreError: the capture or its dataset is not complete, or a shard is damaged.
        TargetError: a layer that the format cannot name.
    """
    folder, store = Path(spec.folder), open_store(spec.config)
    if folder.is_dir() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty", remedy="name a new folder")
    manifest = store.read(spec.capture)
    if "dataset" not in manifest.parents:
        raise StoreError(f"{spec.capture} does not name its dataset")
    samples = {sample.key: sample for sample in read_dataset(store.fetch(manifest.parents["dataset"]))}
    identity = manifest.identity
    ids = (*identity["aux_layer_ids"], identity["final_layer_id"])
    form = FORMATS[spec.format]
    writer = form.writer(folder, form.from_capture_ids(ids))
    row = 0
    for number, entry in enumerate(manifest.files, start=1):
        with store.shard_file(manifest, entry.path) as path:
            for stored in ShardReader(path):
                writer.add(row, samples[stored.key], all_states(stored))
                row += 1
        progress(number, len(manifest.files), "shards", f"{row} samples", force=True)
    writer.finish()
    if identity["final_state"] == "loss_rows":
        logger.info("final states of rows that no loss reads are zeros")
    if row < len(samples):
        logger.warning("%d samples of the dataset are quarantined and left out", len(samples) - row)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return ExportCaptureResult(folder=str(folder), num_samples=row, bytes=size)


def all_states(stored: CapturedSample) -> torch.Tensor:
    """States [S, L, H] with the final layer last, zeros where it has no state."""
    tokens, _, hidden = stored.aux_states.shape
    final = torch.zeros(tokens, hidden, dtype=stored.aux_states.dtype)
    final[stored.final_rows] = stored.final_states
    return torch.cat([stored.aux_states, final[:, None]], dim=1)
