"""Captures of a tiny target's own greedy answers, and how tests damage them behind right hashes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3_core.capture import extract
from eagle3_core.capture.job import capture_layout
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.contracts import StepSpec
from eagle3_core.step import Progress
from eagle3_core.store.condemned import condemned
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import file_entry
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shard_writer import write_shard
from eagle3_core.store.shards import CapturedSample, ShardReader
from eagle3_core.target.info import inspect_target
from tests.capture.runs import capture_spec, make_samples
from tests.tiny import make_tiny_target

NUM_SAMPLES = 10
ANSWER_TOKENS = 8


def greedy_samples(
    target: Path, lengths: Sequence[int] = range(12, 12 + NUM_SAMPLES), vocab_size: int = 500
) -> list[Sample]:
    """Prompts of random ids with the target's own greedy answers.

    Args:
        target: folder.
        lengths: tokens of each prompt.
        vocab_size: ids of prompts are below it.
    """
    model = ReferenceModel(inspect_target(target), "float32")
    samples = []
    for sample in make_samples(lengths, vocab_size):
        ids = sample.input_ids.tolist()
        for _ in range(ANSWER_TOKENS):
            ids.append(int(model.forward(torch.tensor(ids), ())[1][-1].argmax()))
        mask = np.array([0] * len(sample) + [1] * ANSWER_TOKENS, np.uint8)
        samples.append(
            replace(sample, input_ids=np.array(ids, np.int32), loss_mask=mask, prompt_length=len(sample))
        )
    return samples


def make_capture(root: Path) -> StepSpec:
    """A capture of ten greedy samples, one a shard."""
    target = make_tiny_target(root / "target")
    capture = {"engine": "reference", "shard_bytes": 4096, "final_state": "loss_rows"}
    spec = capture_spec(root, target, greedy_samples(target), capture=capture)
    extract.run(spec, Progress("extract"))
    return spec


def in_copied_store(made: StepSpec, folder: Path, **verify_fields: Any) -> StepSpec:
    shutil.copytree(made.config.store_path, folder / "store", dirs_exist_ok=True)
    limits = made.config.verify.model_copy(update=verify_fields)
    config = made.config.model_copy(update={"store": str(folder / "store"), "verify": limits})
    return made.model_copy(update={"config": config})


def change_shard(spec: StepSpec, index: int, change: Callable[[CapturedSample], CapturedSample]) -> None:
    """Replace one shard, and its manifest entry with it, so that every hash is right."""
    layout = capture_layout(spec.config, inspect_target(Path(spec.target_path)))
    with LocalStore(spec.config.store_path).writer(spec.outputs["capture"]) as writer:
        path = writer.folder / f"shard-{index:05d}.safetensors"
        samples = [change(sample) for sample in ShardReader(path)]
        writer.record(write_shard(path, samples, layout))
        writer.complete()


def put(name: str, row: int, value: float) -> Callable[[CapturedSample], CapturedSample]:
    def change(sample: CapturedSample) -> CapturedSample:
        states = getattr(sample, name).clone()
        states[row].view(-1)[0] = value
        return replace(sample, **{name: states})

    return change


def change_tensors(spec: StepSpec, index: int, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Replace tensors of one shard as they are, counts that contradict each other included."""
    with LocalStore(spec.config.store_path).writer(spec.outputs["capture"]) as writer:
        path = writer.folder / f"shard-{index:05d}.safetensors"
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata=metadata)
        writer.record(file_entry(writer.folder, path, **writer.files[path.name].facts))
        writer.complete()


def condemned_files(spec: StepSpec) -> list[str]:
    store = LocalStore(spec.config.store_path)
    return list(condemned(store, store.read(spec.outputs["capture"].ref)))
