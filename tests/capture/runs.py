"""Datasets and step specs for the capture tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_core.artifacts import ArtifactPlan, ArtifactRef
from eagle3_core.config import RunConfig
from eagle3_core.contracts import StepSpec
from eagle3_core.identity import plan_capture, plan_verification
from eagle3_core.store.dataset import DATASET_FILE, Sample, content_hash, write_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.target.info import inspect_target

RUN_ID = "test-run"


def make_samples(lengths: Sequence[int], vocab_size: int = 500, seed: int = 0) -> list[Sample]:
    """Samples of random ids; the last half of each is an answer."""
    random = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        ids = random.integers(3, vocab_size, length).astype(np.int32)
        mask = (np.arange(length) >= length // 2).astype(np.uint8)
        split = "heldout" if number % 5 == 4 else "train"
        samples.append(Sample(f"sample-{number:03d}", "random", split, ids, mask, length // 2, "length"))
    return samples


def capture_spec(root: Path, folder: Path, samples: Sequence[Sample], **sections: Any) -> StepSpec:
    """A spec of the step `extract` over `samples`, whose dataset is put into a store below `root`."""
    config = run_config(root, folder, **sections)
    dataset = ArtifactPlan(kind="dataset", identity={"content": content_hash(samples)})
    with open_store(config).writer(dataset) as writer:
        if not writer.is_complete:
            write_dataset(writer.folder / DATASET_FILE, samples)
            writer.complete([writer.folder / DATASET_FILE], content_hash=content_hash(samples))
    engine = f"{config.capture.engine}-test"
    plan = plan_capture(config, inspect_target(folder), dataset.ref, content_hash(samples), engine)
    return StepSpec(
        config=config,
        run_id=RUN_ID,
        target_path=str(folder),
        outputs={"capture": plan},
        inputs={"dataset": dataset.ref},
    )


def verify_spec(extract: StepSpec) -> StepSpec:
    """A spec of the step `verify` for the capture that `extract` makes."""
    capture = extract.outputs["capture"].ref
    return extract.model_copy(
        update={
            "outputs": {"verification": plan_verification(extract.config, capture)},
            "inputs": {"dataset": extract.inputs["dataset"], "capture": capture},
        }
    )


def run_config(root: Path, folder: Path, **sections: Any) -> RunConfig:
    """A small run on the CPU in `root`; `sections` override whole sections by field."""
    document: dict[str, Any] = {
        "name": "capture-test",
        "target": {"model": str(folder), "dtype": "float32"},
        "capture": {"engine": "reference", "shard_bytes": 64 << 10, "max_batched_tokens": 256},
        "engine": {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 1},
        "limits": {"min_free_disk_gib": 0},
        "workspace": str(root),
        "store": str(root / "store"),
    }
    for section, fields in sections.items():
        document[section] = document.get(section, {}) | fields if isinstance(fields, dict) else fields
    return RunConfig.model_validate(document)


def capture_folder(spec: StepSpec) -> Path:
    """Where the capture of a spec lies."""
    ref: ArtifactRef = spec.outputs["capture"].ref if "capture" in spec.outputs else spec.inputs["capture"]
    return LocalStore(spec.config.store_path).folder(ref)
