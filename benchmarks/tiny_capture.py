"""Writes a small target and a capture of it that a draft learns within seconds on one core.

Legend: V target vocabulary, H hidden size, S tokens of a sample.

Text is a walk through one cycle of all V ids. The LM head's row of an id is the embedding of the id before
it, so the final state of a token is its embedding, and its most likely follower is the true one. A draft has
to learn that it may pass on the embedding of the token that it has just read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.random_target import TargetShape, target_config
from eagle3_core.artifacts import ArtifactPlan, ArtifactRef
from eagle3_core.config import RunConfig, load_profile
from eagle3_core.data.vocabulary import answer_counts, build_vocabulary, save_vocabulary
from eagle3_core.identity import plan_vocabulary
from eagle3_core.store.dataset import DATASET_FILE, Sample, write_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shard_writer import write_shard
from eagle3_core.store.shards import CapturedSample, ShardLayout
from eagle3_core.target.info import inspect_target

SHAPE = TargetShape(hidden=64, intermediate=96, layers=4, heads=4, kv_heads=2, vocab=96)
DRAFT_VOCAB = 80
AUX_IDS = (1, 2, 3)
NUM_TRAIN, NUM_HELDOUT = 48, 8
PROMPT_TOKENS = 6
PROFILE = "tiny.yaml"
NOISE = 0.3
"""Standard deviation of what the states hold beside embeddings of mean square 1."""


def tiny_config(root: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A configuration for the target and the store below `root`, with `section.field=value` over it."""
    document = {
        "name": "tiny",
        "target": {"model": str(root / "target"), "aux_layer_ids": list(AUX_IDS)},
        "store": str(root / "store"),
        "draft": {"vocab_size": DRAFT_VOCAB},
        "train": {"pack_tokens": 128, "num_epochs": 4, "learning_rate": 3e-3, "ttt_steps": 3},
    }
    (root / PROFILE).write_text(json.dumps(document))
    return load_profile(root / PROFILE, overrides)


def write_tiny_capture(root: Path, seed: int = 0) -> dict[str, ArtifactRef]:
    """Write a target to `root/target`, and dataset, vocabulary and capture to the store in `root/store`.

    Args:
        root: a folder, with the profile that `tiny_config` wrote.
        seed: of embeddings, texts and noise.

    Returns:
        The artifacts by kind.
    """
    config = load_profile(root / PROFILE)
    generator = np.random.default_rng(seed)
    cycle = generator.permutation(SHAPE.vocab)
    embeddings = torch.from_numpy(generator.standard_normal((SHAPE.vocab, SHAPE.hidden))).float()
    write_target(root / "target", embeddings, cycle)
    samples = [_sample(number, cycle, generator) for number in range(NUM_TRAIN + NUM_HELDOUT)]
    store = LocalStore(root / "store")
    dataset = ArtifactPlan(kind="dataset", identity={"tiny": seed})
    with store.writer(dataset) as writer:
        write_dataset(writer.folder / DATASET_FILE, samples)
        writer.complete([writer.folder / DATASET_FILE])
    vocabulary = plan_vocabulary(config, inspect_target(root / "target"), dataset.ref)
    counts = answer_counts(samples, SHAPE.vocab, "train")
    with store.writer(vocabulary) as writer:
        mapping = build_vocabulary(counts, DRAFT_VOCAB, SHAPE.vocab)
        writer.complete([save_vocabulary(mapping, writer.folder)])
    capture = ArtifactPlan(kind="capture", identity={"tiny": seed}, parents={"dataset": dataset.ref})
    layout = ShardLayout(AUX_IDS, SHAPE.layers, SHAPE.hidden, "bfloat16", "loss_rows")
    with store.writer(capture) as writer:
        states = [_states(sample, embeddings, generator) for sample in samples]
        writer.record(write_shard(writer.folder / "shard-00000.safetensors", states, layout))
        writer.complete()
    return {plan.kind: plan.ref for plan in (dataset, vocabulary, capture)}


def write_target(folder: Path, embeddings: torch.Tensor, cycle: np.ndarray) -> None:
    """Write embedding, final norm and LM head, which are all that training reads of a target.

    Args:
        folder: made here.
        embeddings: [V, H].
        cycle: [V], the ids in the order in which they follow each other.
    """
    folder.mkdir(parents=True)
    head = torch.empty_like(embeddings)
    head[np.roll(cycle, -1)] = embeddings[cycle]
    tensors = {
        "model.embed_tokens.weight": embeddings.to(torch.bfloat16),
        "model.norm.weight": torch.ones(SHAPE.hidden, dtype=torch.bfloat16),
        "lm_head.weight": (head / SHAPE.hidden**0.5).to(torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(target_config(SHAPE)))


def _sample(number: int, cycle: np.ndarray, generator: np.random.Generator) -> Sample:
    """A walk of 16 to 40 tokens from a random id."""
    length, start = int(generator.integers(16, 41)), int(generator.integers(len(cycle)))
    return Sample(
        key=f"sample-{number}",
        kind="walk",
        split="train" if number < NUM_TRAIN else "heldout",
        input_ids=cycle[(start + np.arange(length)) % len(cycle)].astype(np.int32),
        loss_mask=(np.arange(length) >= PROMPT_TOKENS).astype(np.uint8),
        prompt_length=PROMPT_TOKENS,
        finish_reason="length",
    )


def _states(sample: Sample, embeddings: torch.Tensor, generator: np.random.Generator) -> CapturedSample:
    """Embeddings with noise as auxiliary states, [S, 3, H], and as final states."""
    own = embeddings[sample.input_ids]
    noise = generator.standard_normal((len(sample), len(AUX_IDS), SHAPE.hidden))
    aux = own.unsqueeze(1) + NOISE * torch.from_numpy(noise).float()
    rows = torch.from_numpy(sample.final_rows("loss_rows"))
    return CapturedSample(
        key=sample.key,
        input_ids=torch.from_numpy(sample.input_ids),
        loss_mask=torch.from_numpy(sample.loss_mask),
        aux_states=aux.to(torch.bfloat16),
        final_states=own[rows].to(torch.bfloat16),
        final_rows=rows,
    )
