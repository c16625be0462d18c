"""Writes a target and a capture that a draft learns within few steps, the tiny one in seconds on one core.

Legend: V target vocabulary, H hidden size, S tokens of a sample.

Text is a walk through one cycle of the first ids, in the tiny one of all V. The LM head's row of an id is the
embedding of the id before it, so the final state of a token is its embedding, and its most likely follower is
the true one. A draft has to learn that it may pass on the embedding of the token that it has just read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.random_target import TargetShape, target_config
from eagle3_core.artifacts import ArtifactPlan, ArtifactRef, FileEntry
from eagle3_core.config import RunConfig, load_profile
from eagle3_core.data.vocabulary import answer_counts, build_vocabulary, save_vocabulary
from eagle3_core.identity import plan_vocabulary
from eagle3_core.store.dataset import DATASET_FILE, Sample, write_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shard_writer import write_shard
from eagle3_core.store.shards import CapturedSample, ShardLayout
from eagle3_core.target.info import inspect_target

AUX_IDS = (1, 2, 3)
PROFILE = "tiny.yaml"
NOISE = 0.3
"""Standard deviation of what the states hold beside embeddings of mean square 1."""
NOISE_NUMBERS = 1 << 20
"""Random numbers that samples take noise from, each at another place; at least twice as many as one takes."""
WRITING_THREADS = 8


@dataclass(frozen=True)
class CaptureSize:
    """How much is written.

    Attributes:
        shape: of the target.
        draft_vocab: ids of the draft's vocabulary.
        cycle: ids that texts have; embeddings of others are zero.
        num_train, num_heldout: samples.
        lengths: tokens of a sample, at least and at most.
        prompt_tokens: of a sample; the others carry loss.
        samples_of_shard: at most.
    """

    shape: TargetShape
    draft_vocab: int
    cycle: int
    num_train: int
    num_heldout: int
    lengths: tuple[int, int]
    prompt_tokens: int
    samples_of_shard: int


TINY = CaptureSize(
    shape=TargetShape(hidden=64, intermediate=96, layers=4, heads=4, kv_heads=2, vocab=96),
    draft_vocab=80,
    cycle=96,
    num_train=48,
    num_heldout=8,
    lengths=(16, 40),
    prompt_tokens=6,
    samples_of_shard=56,
)


def tiny_config(root: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A configuration for the target and the store below `root`, with `section.field=value` over it."""
    document = {
        "name": "tiny",
        "target": {"model": str(root / "target"), "aux_layer_ids": list(AUX_IDS)},
        "store": str(root / "store"),
        "draft": {"vocab_size": TINY.draft_vocab},
        "train": {"pack_tokens": 128, "num_epochs": 4, "learning_rate": 3e-3, "ttt_steps": 3},
    }
    (root / PROFILE).write_text(json.dumps(document))
    return load_profile(root / PROFILE, overrides)


def write_tiny_capture(root: Path, seed: int = 0) -> dict[str, ArtifactRef]:
    """Write a tiny capture for the profile that `tiny_config` wrote to `root`; see `write_capture`."""
    return write_capture(root, load_profile(root / PROFILE), TINY, seed)


def write_capture(root: Path, config: RunConfig, size: CaptureSize, seed: int = 0) -> dict[str, ArtifactRef]:
    """Write a target to `root/target`, and dataset, vocabulary and capture to the store in `root/store`.

    Args:
        root: a folder.
        config: of who reads the capture, with target and store there.
        size: how much is written.
        seed: of embeddings, texts and noise.

    Returns:
        The artifacts by kind.
    """
    generator = np.random.default_rng(seed)
    cycle = generator.permutation(size.cycle)
    drawn = torch.Generator().manual_seed(seed)
    embeddings = torch.zeros(size.shape.vocab, size.shape.hidden)
    embeddings[: size.cycle].normal_(generator=drawn)
    write_target(root / "target", size.shape, embeddings, cycle)
    samples = [_sample(size, number, cycle, generator) for number in range(size.num_train + size.num_heldout)]
    store = LocalStore(root / "store")
    dataset = ArtifactPlan(kind="dataset", identity={"tiny": seed})
    with store.writer(dataset) as writer:
        write_dataset(writer.folder / DATASET_FILE, samples)
        writer.complete([writer.folder / DATASET_FILE])
    vocabulary = plan_vocabulary(config, inspect_target(root / "target"), dataset.ref)
    counts = answer_counts(samples, size.shape.vocab, "train")
    with store.writer(vocabulary) as writer:
        mapping = build_vocabulary(counts, size.draft_vocab, size.shape.vocab)
        writer.complete([save_vocabulary(mapping, writer.folder)])
    capture = ArtifactPlan(kind="capture", identity={"tiny": seed}, parents={"dataset": dataset.ref})
    with store.writer(capture) as writer:
        for entry in _write_shards(writer.folder, size, samples, embeddings, seed):
            writer.record(entry)
        writer.complete()
    return {plan.kind: plan.ref for plan in (dataset, vocabulary, capture)}


def write_target(folder: Path, shape: TargetShape, embeddings: torch.Tensor, cycle: np.ndarray) -> None:
    """Write embedding, final norm and LM head, which are all that training reads of a target.

    Args:
        folder: made here.
        shape: of the target.
        embeddings: [V, H].
        cycle: the ids of texts in the order in which they follow each other.
    """
    folder.mkdir(parents=True)
    head = embeddings.clone()
    head[np.roll(cycle, -1)] = embeddings[cycle]
    tensors = {
        "model.embed_tokens.weight": embeddings.to(torch.bfloat16),
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        "lm_head.weight": (head / shape.hidden**0.5).to(torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(target_config(shape)))


def _sample(size: CaptureSize, number: int, cycle: np.ndarray, generator: np.random.Generator) -> Sample:
    """A walk from a random id."""
    shortest, longest = size.lengths
    length, start = int(generator.integers(shortest, longest + 1)), int(generator.integers(len(cycle)))
    return Sample(
        key=f"sample-{number}",
        kind="walk",
        split="train" if number < size.num_train else "heldout",
        input_ids=cycle[(start + np.arange(length)) % len(cycle)].astype(np.int32),
        loss_mask=(np.arange(length) >= size.prompt_tokens).astype(np.uint8),
        prompt_length=size.prompt_tokens,
        finish_reason="length",
    )


def _write_shards(
    folder: Path, size: CaptureSize, samples: Sequence[Sample], embeddings: torch.Tensor, seed: int
) -> Iterator[FileEntry]:
    """Write all shards, several at once, and yield their entries in order."""
    shape = size.shape
    layout = ShardLayout(AUX_IDS, shape.layers, shape.hidden, "bfloat16", "loss_rows")
    count = max(NOISE_NUMBERS, 2 * size.lengths[1] * len(AUX_IDS) * shape.hidden)
    noise = NOISE * torch.randn(count, generator=torch.Generator().manual_seed(seed + 1))
    starts = range(0, len(samples), size.samples_of_shard)

    def write(number: int) -> FileEntry:
        group = samples[starts[number] : starts[number] + size.samples_of_shard]
        generator = np.random.default_rng((seed, number))
        states = [_states(sample, embeddings, noise, generator) for sample in group]
        return write_shard(folder / f"shard-{number:05d}.safetensors", states, layout)

    with ThreadPoolExecutor(min(WRITING_THREADS, len(os.sched_getaffinity(0)))) as pool:
        yield from pool.map(write, range(len(starts)))


def _states(
    sample: Sample, embeddings: torch.Tensor, noise: torch.Tensor, generator: np.random.Generator
) -> CapturedSample:
    """Embeddings with noise as auxiliary states, [S, 3, H], and as final states."""
    own = embeddings[sample.input_ids]
    shape = (len(sample), len(AUX_IDS), own.shape[1])
    numbers = len(sample) * len(AUX_IDS) * own.shape[1]
    start = int(generator.integers(len(noise) - numbers))
    aux = own.unsqueeze(1) + noise[start : start + numbers].view(shape)
    rows = torch.from_numpy(sample.final_rows("loss_rows"))
    return CapturedSample(
        key=sample.key,
        input_ids=torch.from_numpy(sample.input_ids),
        loss_mask=torch.from_numpy(sample.loss_mask),
        aux_states=aux.to(torch.bfloat16),
        final_states=own[rows].to(torch.bfloat16),
        final_rows=rows,
    )
