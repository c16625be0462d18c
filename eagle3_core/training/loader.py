"""Reads captured samples and puts them into packs, ahead of the trainer, wherever the capture lies.

Legend: S tokens of a sample, R rows of a pack (S - 1 a document), A auxiliary layers, H hidden size,
n labels.

Which samples share a pack, and in which order packs come, follows from seed and epoch alone. A sample is
never split: one that is longer than `pack_tokens` gets a pack of its own. Samples that cannot be trained on
are left out, counted and named.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import tee

import numpy as np
import torch
from torch import Tensor

from eagle3_core.contracts import Rejection
from eagle3_core.errors import TrainingError
from eagle3_core.store.dataset import Sample, Split
from eagle3_core.store.labels import Labels, SampleLabels
from eagle3_core.store.samples import SamplePlace, SampleSource
from eagle3_core.store.shards import CapturedSample
from eagle3_core.training.rows import plan_rows
from eagle3_core.training.sending import Sender
from eagle3_core.training.ttt import Pack

OPEN_PACKS = 8
"""Packs that are filled side by side: a sample goes into the first of them with room for it."""


@dataclass(frozen=True)
class StoredSample:
    """Where a sample's states lie.

    Attributes:
        key: of the dataset's sample.
        place: shard and number in it.
        num_tokens: S.
        prompt_length: tokens before the last answer.
        answer_length: tokens of the last answer, end-of-turn token included.
    """

    key: str
    place: SamplePlace
    num_tokens: int
    prompt_length: int
    answer_length: int


def fingerprint(samples: Iterable[StoredSample]) -> str:
    """A hash of what the packs of an epoch follow from, seed and settings apart."""
    lines = "".join(f"{sample.key} {sample.num_tokens}\n" for sample in samples)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


@dataclass
class SampleIndex:
    """The samples of both splits that can be trained on, in dataset order, and those left out."""

    splits: dict[Split, list[StoredSample]]
    skipped: list[Rejection] = field(default_factory=list)


def index_samples(samples: Sequence[Sample], source: SampleSource, bad: dict[str, str]) -> SampleIndex:
    """Find every sample of the dataset in a capture.

    Args:
        samples: the dataset.
        source: the capture.
        bad: key and problem of samples that verification found bad, quarantined ones included.

    Raises:
        TrainingError: a sample of the dataset is in no shard, or a split has no sample left.
        StoreError: a shard cannot be read.
    """
    shards = source.load()
    places = {
        key: SamplePlace(name, index)
        for name, shard in shards.items()
        for index, key in enumerate(shard.keys)
    }
    index = SampleIndex({"train": [], "heldout": []})
    for sample in samples:
        reason = bad.get(sample.key) or _without_loss(sample)
        if reason:
            index.skipped.append(Rejection(key=sample.key, reason=reason))
            continue
        if sample.key not in places:
            raise TrainingError(
                f"sample {sample.key} of the dataset is in none of the {len(shards)} shards of the capture",
                remedy="run the extract stage again",
            )
        answer = int(sample.loss_mask[sample.prompt_length :].sum())
        stored = StoredSample(sample.key, places[sample.key], len(sample), sample.prompt_length, answer)
        index.splits[sample.split].append(stored)
    _refuse_empty_split(index, samples)
    return index


def _without_loss(sample: Sample) -> str | None:
    return None if sample.loss_mask[1:].any() else "no token after the first carries loss"


def _refuse_empty_split(index: SampleIndex, samples: Sequence[Sample]) -> None:
    total = Counter(sample.split for sample in samples)
    for split, other in (("train", "heldout"), ("heldout", "train")):
        if not index.splits[split]:  # type: ignore[index]
            raise TrainingError(
                f"the {split} split has no sample to use: {total[split]} in the dataset, "  # type: ignore[index]
                f"{len(index.skipped)} of both splits left out; the {other} split has "
                f"{len(index.splits[other])}",  # type: ignore[index]
                expected="samples in both splits",
                remedy="add prompts, or change data.heldout_fraction or the rows' own `split`",
            )


def plan_packs(lengths: Sequence[int], pack_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Which samples go into which pack of an epoch; every sample is in exactly one.

    Args:
        lengths: tokens of each sample.
        pack_tokens: most tokens of a pack, unless it holds one longer sample alone.
        seed: of the run.
        epoch: the order differs from epoch to epoch.

    Returns:
        Packs of indices into `lengths`.
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    return _fill([int(index) for index in order], lengths, pack_tokens)


def plan_in_order(lengths: Sequence[int], pack_tokens: int) -> list[list[int]]:
    """Packs of samples in their own order, for evaluation."""
    return _fill(list(range(len(lengths))), lengths, pack_tokens)


def _fill(order: Sequence[int], lengths: Sequence[int], pack_tokens: int) -> list[list[int]]:
    """First fit over a few open packs; the fullest leaves when a sample fits none of them."""
    done: list[list[int]] = []
    waiting: list[tuple[int, list[int]]] = []
    for index in order:
        size = lengths[index]
        place = next((i for i, (used, _) in enumerate(waiting) if used + size <= pack_tokens), None)
        if place is not None:
            used, members = waiting[place]
            waiting[place] = (used + size, [*members, index])
            continue
        if len(waiting) == OPEN_PACKS:
            fullest = max(range(len(waiting)), key=lambda i: waiting[i][0])
            done.append(waiting.pop(fullest)[1])
        waiting.append((size, [index]))
    return done + [members for _, members in waiting]


class PackReader:
    """Builds packs of one split from a capture.

    Args:
        source: the capture.
        samples: the split's samples.
        num_steps: TTT steps that a pack is planned for.
        labels: of the capture; without them packs have no `argmax` and `share`.
        device: where `packs` go; to a GPU they are sent while it works on others.
    """

    def __init__(
        self,
        source: SampleSource,
        samples: Sequence[StoredSample],
        num_steps: int,
        labels: Labels | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.source, self.samples, self.num_steps, self.labels = source, samples, num_steps, labels
        self._sender = Sender(device) if device is not None and device.type == "cuda" else None

    def pack(self, members: Sequence[int]) -> Pack:
        """The pack of the given samples, on the CPU.

        Raises:
            TrainingError: a shard lacks final states that a loss reads.
            StoreError: a sample cannot be read.
        """
        return next(self._built([members], pinned=False))

    def packs(self, plan: Iterable[Sequence[int]]) -> Iterator[Pack]:
        """The planned packs in order, on their way to the device; reads ahead. Raises as `pack`."""
        if self._sender is None:
            return self._built(plan, pinned=False)
        return map(self._sender.send, self._built(plan, pinned=True))

    def _built(self, plan: Iterable[Sequence[int]], pinned: bool) -> Iterator[Pack]:
        for_samples, here = tee(plan)
        places = (self.samples[index].place for members in for_samples for index in members)
        with self.source.ahead(places) as samples:
            for members in here:
                labels = self._labels(members)
                yield build_pack([next(samples) for _ in members], self.num_steps, labels, pinned)

    def _labels(self, members: Sequence[int]) -> list[SampleLabels] | None:
        if self.labels is None:
            return None
        stored = [self.samples[index] for index in members]
        return [self.labels.sample(each.place, each.key) for each in stored]

    def loss_mask(self, index: int) -> np.ndarray:
        """[S] bool, of one sample; from memory."""
        return self.source.loss_mask(self.samples[index].place)


def build_pack(
    samples: Sequence[CapturedSample],
    num_steps: int,
    labels: Sequence[SampleLabels] | None = None,
    pinned: bool = False,
) -> Pack:
    """Documents side by side with their row plan; see `rows` for the alignment.

    Args:
        samples: the documents.
        num_steps: TTT steps.
        labels: of each sample.
        pinned: whether tensors lie in memory from which a GPU copies without waiting.

    Raises:
        TrainingError: final states of label rows are missing, or labels of other masks were given.
    """
    masks = [sample.loss_mask[1:].bool() for sample in samples]
    lengths = [len(mask) for mask in masks]
    mask = torch.cat(masks)
    for sample, own, given in zip(samples, masks, labels or (), strict=labels is not None):
        if int(own.sum()) != len(given):
            raise TrainingError(
                f"sample {sample.key} has {len(given)} labels",
                expected=f"{int(own.sum())}, one for each row that the loss reads",
                remedy="remove the labels of this capture from the store and run the stage train again",
            )
    return Pack(
        keys=tuple(sample.key for sample in samples),
        input_ids=_joined([sample.input_ids[1:].long() for sample in samples], pinned),
        aux_states=_joined([sample.aux_states[:-1].flatten(1) for sample in samples], pinned),
        positions=_joined([torch.arange(1, length + 1) for length in lengths], pinned),
        final_states=_joined([label_states(sample) for sample in samples], pinned),
        plan=plan_rows(lengths, mask.numpy(), num_steps),
        argmax=torch.from_numpy(np.concatenate([each.argmax for each in labels])) if labels else None,
        share=torch.from_numpy(np.concatenate([each.share for each in labels])) if labels else None,
    )


def _joined(parts: list[Tensor], pinned: bool) -> Tensor:
    """Rows of all parts, copied once."""
    if not pinned:
        return torch.cat(parts)
    rows = sum(len(part) for part in parts)
    room = torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=True)
    return torch.cat(parts, out=room)


def label_states(sample: CapturedSample) -> Tensor:
    """[n, H], the final states y[j] of the tokens j >= 1 with l[j] = 1.

    Raises:
        TrainingError: some are missing.
    """
    wanted = 1 + sample.loss_mask[1:].nonzero().squeeze(-1)
    places = torch.searchsorted(sample.final_rows, wanted)
    found = places < len(sample.final_rows)
    if not bool(found.all()) or not torch.equal(sample.final_rows[places], wanted):
        raise TrainingError(
            f"sample {sample.key} has {len(sample.final_rows)} final states, not all of the {len(wanted)} "
            "that the loss reads",
            remedy="run the extract stage again",
        )
    return sample.final_states[places]
