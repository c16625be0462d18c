"""A tiny draft, random captured samples and the forward of speculators to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.config import RunConfig, parse_config
from eagle3_core.contracts import StepSpec
from eagle3_core.data.vocabulary import DraftVocabulary, save_vocabulary
from eagle3_core.identity import (
    draft_vocab_size,
    plan_capture,
    plan_checkpoint,
    plan_dataset,
    plan_labels,
    plan_vocabulary,
)
from eagle3_core.store.dataset import DATASET_FILE, Sample, content_hash, write_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shard_writer import write_shard
from eagle3_core.store.shards import CapturedSample, ShardLayout
from eagle3_core.target.info import TargetInfo

AUX_IDS = (1, 2, 3)


def make_config(target: str = "unused", **sections: Any) -> RunConfig:
    """A configuration for a tiny target with fp32 training; `sections` are merged over it."""
    document: dict[str, Any] = {
        "name": "tiny",
        "target": {"model": target, "aux_layer_ids": list(AUX_IDS)},
        "draft": {"vocab_size": 64},
        "train": {"compute_dtype": "float32", "pack_tokens": 64, "num_epochs": 2, "learning_rate": 1e-3},
        "benchmark": {"num_prompts": 2, "max_tokens": 12},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values} if isinstance(values, dict) else values
    return parse_config(document)


def make_vocabulary(draft_size: int, target_size: int, seed: int = 1) -> DraftVocabulary:
    """A random choice of target ids."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(target_size, generator=generator)[:draft_size].sort().values
    t2d = torch.zeros(target_size, dtype=torch.bool)
    t2d[chosen] = True
    return DraftVocabulary((chosen - torch.arange(draft_size)).numpy(), t2d.numpy())


def random_sample(
    target: TargetInfo, mask: Sequence[int], key: str = "sample", seed: int = 0
) -> CapturedSample:
    """States and ids drawn from N(0, 1), with final states for the rows that a loss reads."""
    generator = torch.Generator().manual_seed(seed)
    tokens = len(mask)
    loss_mask = torch.tensor(mask, dtype=torch.uint8)
    rows = 1 + loss_mask[1:].nonzero().squeeze(-1)
    return CapturedSample(
        key=key,
        input_ids=torch.randint(0, target.vocab_size, (tokens,), generator=generator, dtype=torch.int32),
        loss_mask=loss_mask,
        aux_states=torch.randn(tokens, len(AUX_IDS), target.hidden_size, generator=generator),
        final_states=torch.randn(len(rows), target.hidden_size, generator=generator),
        final_rows=rows,
    )


def speculators_forward(
    draft: Any, samples: Sequence[CapturedSample], num_steps: int, decay: float
) -> Tensor:
    """The loss of speculators' own forward on a pack, with its `eager` attention and eager KL."""
    from speculators.losses import resolve_loss_config

    hidden = torch.cat([sample.aux_states[:-1].flatten(1) for sample in samples])
    final = []
    for sample in samples:
        states = torch.zeros(len(sample.input_ids), sample.final_states.shape[1])
        states[sample.final_rows] = sample.final_states
        final.append(states[1:])
    lengths = [len(sample.input_ids) - 1 for sample in samples]
    documents = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths))
    _, loss, _ = draft(
        hidden_states=hidden.unsqueeze(0),
        input_ids=torch.cat([sample.input_ids[1:] for sample in samples]).long().unsqueeze(0),
        document_ids=documents.unsqueeze(0),
        loss_mask=torch.cat([sample.loss_mask[1:] for sample in samples]).bool().unsqueeze(0),
        position_ids=torch.cat([torch.arange(1, length + 1) for length in lengths]).unsqueeze(0),
        verifier_last_hidden_states=torch.cat(final).unsqueeze(0),
        ttt_steps=num_steps,
        ttt_step_loss_decay=decay,
        loss_config=resolve_loss_config("kl_div", "eager"),
    )
    return loss


def make_samples(target: TargetInfo, num_train: int = 12, num_heldout: int = 4) -> list[Sample]:
    """Samples of 10 to 30 tokens, the second half of each an answer."""
    generator = np.random.default_rng(3)
    samples = []
    for number in range(num_train + num_heldout):
        length = int(generator.integers(10, 31))
        prompt = length // 2
        samples.append(
            Sample(
                key=f"sample-{number}",
                kind=("list", "code")[number % 2],
                split="train" if number < num_train else "heldout",
                input_ids=generator.integers(0, target.vocab_size, length).astype(np.int32),
                loss_mask=np.array([0] * prompt + [1] * (length - prompt), np.uint8),
                prompt_length=prompt,
                finish_reason="stop",
            )
        )
    return samples


def capture_of(sample: Sample, target: TargetInfo, seed: int) -> CapturedSample:
    """Random states for a sample of a dataset."""
    states = random_sample(target, sample.loss_mask.tolist(), sample.key, seed)
    return replace(states, input_ids=torch.from_numpy(sample.input_ids))


def write_inputs(root: Path, config: RunConfig, target: TargetInfo, samples: Sequence[Sample]) -> StepSpec:
    """Dataset, vocabulary and capture (two shards) as complete artifacts; the spec that names them."""
    config = config.model_copy(update={"store": str(root)})
    store = LocalStore(root)
    conversations = ArtifactPlan(kind="conversations", identity={"tiny": 1}).ref
    dataset = plan_dataset(config, target, conversations)
    with store.writer(dataset) as writer:
        write_dataset(writer.folder / DATASET_FILE, samples)
        writer.complete([writer.folder / DATASET_FILE])
    vocabulary = plan_vocabulary(config, target, dataset.ref)
    with store.writer(vocabulary) as writer:
        mapping = make_vocabulary(draft_vocab_size(config, target), target.vocab_size)
        writer.complete([save_vocabulary(mapping, writer.folder)])
    capture = plan_capture(config, target, dataset.ref, content_hash(samples), "reference")
    layout = ShardLayout(AUX_IDS, target.num_layers, target.hidden_size, "float32", "loss_rows")
    half = len(samples) // 2
    with store.writer(capture) as writer:
        for number, group in enumerate((samples[:half], samples[half:])):
            states = [capture_of(each, target, 100 * number + i) for i, each in enumerate(group)]
            writer.record(write_shard(writer.folder / f"shard-{number:05d}.safetensors", states, layout))
        writer.complete()
    return StepSpec(
        config=config,
        run_id="tiny-run",
        target_path=target.path,
        outputs={
            "labels": plan_labels(capture.ref, vocabulary.ref),
            "checkpoint": plan_checkpoint(config, target, capture.ref, vocabulary.ref),
        },
        inputs={"capture": capture.ref, "vocabulary": vocabulary.ref, "dataset": dataset.ref},
    )
