"""Makes the labels of a capture once, before training: one pass of the target's whole LM head.

Legend: n labels, H hidden size, V target vocabulary, D draft vocabulary.

Nothing of the target is needed but its final norm and LM head: the final states of all label rows are stored.
Labels are made and recorded shard by shard, so an interrupted making goes on with the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from eagle3_core.artifacts import ArtifactPlan, FileEntry, Manifest
from eagle3_core.data.vocabulary import DraftVocabulary
from eagle3_core.store.disk import make_room
from eagle3_core.store.files import file_entry, write_atomic
from eagle3_core.store.labels import MADE_FROM, LabelSource, SampleLabels, encode_labels, outdated
from eagle3_core.store.local import ArtifactWriter, LocalStore
from eagle3_core.store.samples import SamplePlace, SampleSource
from eagle3_core.target.weights import FinalHead
from eagle3_core.training.loader import label_states

if TYPE_CHECKING:
    from eagle3_core.step import Progress

logger = logging.getLogger(__name__)
STATES_AT_ONCE = 4096
"""Rows that are gathered over samples before the LM head runs on them."""
WAIT_SECONDS = 6 * 3600.0
"""Trainings of one capture that start together need the same labels: one makes them, and the others wait."""


class LabelMaker:
    """Turns final states into labels.

    Args:
        head: the target's norm and whole LM head.
        vocabulary: of the draft.
    """

    def __init__(self, head: FinalHead, vocabulary: DraftVocabulary) -> None:
        self._head = head
        self._draft_ids = torch.from_numpy(vocabulary.draft_to_target).to(head.device)

    def labels(self, states: Iterable[Tensor]) -> list[SampleLabels]:
        """Labels of each sample's states, [n, H] before the final norm."""
        found: list[SampleLabels] = []
        waiting: list[Tensor] = []
        for each in states:
            waiting.append(each)
            if sum(map(len, waiting)) >= STATES_AT_ONCE:
                found += self._labels(waiting)
                waiting = []
        return found + (self._labels(waiting) if waiting else [])

    @torch.no_grad()
    def _labels(self, states: list[Tensor]) -> list[SampleLabels]:
        together = torch.cat(states)
        argmax, share = np.empty(len(together), np.int32), np.empty(len(together), np.float32)
        for part, logits in self._head.chunks(together):
            argmax[part] = logits.argmax(-1).to(torch.int32).cpu().numpy()
            inside = torch.logsumexp(logits.index_select(1, self._draft_ids), -1)
            log_share = inside - torch.logsumexp(logits, -1)
            share[part] = log_share.exp().clamp(max=1.0).cpu().numpy()
        cuts = np.cumsum([len(each) for each in states])[:-1]
        return [
            SampleLabels(*pair) for pair in zip(np.split(argmax, cuts), np.split(share, cuts), strict=True)
        ]


def make_labels(
    store: LocalStore,
    plan: ArtifactPlan,
    run_id: str,
    source: SampleSource,
    capture: Manifest,
    vocabulary: DraftVocabulary,
    head: Callable[[], FinalHead],
    progress: Progress,
) -> LabelSource:
    """The labels of a capture; made where they are missing, damaged or of an earlier making of a shard.

    Args:
        store: of capture and labels.
        plan: of the labels.
        run_id: who makes them.
        source: samples of the capture.
        capture: its manifest.
        vocabulary: of the draft.
        head: loads the target's norm and LM head; not called where nothing is to be made.
        progress: told of every shard.

    Raises:
        TrainingError: a shard lacks final states that a loss reads.
        StoreError: a sample cannot be read, or somebody else has been making the labels for hours.
    """
    started = time.monotonic()
    names = source.shard_names
    with store.writer(plan, run_id, WAIT_SECONDS) as writer:
        todo = outdated(writer.files, capture, names)
        if todo or not writer.is_complete:
            maker = LabelMaker(head(), vocabulary) if todo else None
            for number, name in enumerate(todo):
                assert maker is not None
                writer.record(_make_file(writer, source, capture, name, maker, vocabulary))
                progress(len(names) - len(todo) + number + 1, len(names), "shards", "labels")
            for gone in writer.files.keys() - set(names):
                del writer.files[gone]
            facts = _facts(writer.files.values())
            writer.complete(seconds=time.monotonic() - started, **facts)
            _log(facts, len(todo), time.monotonic() - started)
    return LabelSource(store, store.read(plan.ref))


def _make_file(
    writer: ArtifactWriter,
    source: SampleSource,
    capture: Manifest,
    name: str,
    maker: LabelMaker,
    vocabulary: DraftVocabulary,
) -> FileEntry:
    """Write the labels of one shard."""
    keys = source.load()[name].keys
    with source.ahead(SamplePlace(name, number) for number in range(len(keys))) as samples:
        labels = maker.labels(label_states(sample) for sample in samples)
    content, path = encode_labels(keys, labels), writer.folder / name
    make_room(writer.folder, len(content), name)
    write_atomic(path, content)
    shard = capture.file(name)
    assert shard is not None
    facts = {MADE_FROM: shard.xxh3_128} | _counts(labels, vocabulary)
    return file_entry(writer.folder, path).model_copy(update={"facts": facts})


def _counts(labels: Sequence[SampleLabels], vocabulary: DraftVocabulary) -> dict[str, float]:
    """What a shard's labels say; rows of states that are not finite are counted, and say nothing else."""
    argmax = np.concatenate([np.empty(0, np.int32), *(each.argmax for each in labels)])
    share = np.concatenate([np.empty(0, np.float32), *(each.share for each in labels)])
    sound = np.isfinite(share)
    return {
        "num_labels": len(share),
        "num_nonfinite": int((~sound).sum()),
        "num_outside": int((~vocabulary.t2d[argmax[sound]]).sum()),
        "share_sum": float(share[sound].sum(dtype=np.float64)),
    }


def _facts(files: Iterable[FileEntry]) -> dict[str, Any]:
    """Counts of all files together."""
    listed = list(files)
    names = ("num_labels", "num_nonfinite", "num_outside", "share_sum")
    total = {name: sum(entry.facts.get(name) or 0 for entry in listed) for name in names}
    share = total.pop("share_sum") / max(1, total["num_labels"] - total["num_nonfinite"])
    return total | {"draft_vocabulary_share": share}


def _log(facts: dict[str, Any], num_made: int, seconds: float) -> None:
    logger.info(
        "made labels of %d shards in %.1f s: in %s of %s rows the target chooses a token that the draft does "
        "not have; the draft's vocabulary holds %.2f %% of the target's probability",
        num_made, seconds, f"{facts['num_outside']:,}", f"{facts['num_labels']:,}",
        100 * facts["draft_vocabulary_share"],
    )  # fmt: skip
    if facts["num_nonfinite"]:
        logger.warning(
            "%s rows of the capture are not finite and have no label: the verify stage names their samples, "
            "which training leaves out",
            f"{facts['num_nonfinite']:,}",
        )
