"""The requests of a probe, and whether each got its own states back.

Legend: S tokens of a request, L captured ids, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eagle3_core.capture.compare import relative_errors
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import CapturedSample

LAYER_LENGTHS = (3, 17, 40, 75, 130)
"""Of the requests of the first session: one longer than a sliding window, one than an engine step."""
NUM_REQUESTS = 30
SHARED_PREFIX = 48
MAX_FOREIGN_FRACTION = 0.05
"""Of a request's rows: rounding may send a single token to other experts."""
FOREIGN_SHARE = 0.5
"""A row further from its reference than this share of the distance to another layer is not its own."""


def layer_requests(vocab_size: int, seed: int = 1) -> list[Sample]:
    """A few prompts of random ids, for the comparison of layers."""
    random = np.random.default_rng(seed)
    return [
        _sample(f"layers-{number}", random.integers(3, vocab_size, length))
        for number, length in enumerate(LAYER_LENGTHS)
    ]


def mixed_requests(vocab_size: int, seed: int = 2) -> list[Sample]:
    """30 prompts of mixed lengths in a mixed order: 18 of their own, one prompt four times, four that share
    a prefix, and four that are each the beginning of the next."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(3, vocab_size, length) for length in random.integers(2, 150, 18)]
    repeated = random.integers(3, vocab_size, 61)
    prompts += [repeated] * 4
    prefix = random.integers(3, vocab_size, SHARED_PREFIX)
    prompts += [np.concatenate([prefix, random.integers(3, vocab_size, 5 + 9 * n)]) for n in range(4)]
    whole = random.integers(3, vocab_size, 100)
    prompts += [whole[:length] for length in (25, 50, 75, 100)]
    order = random.permutation(NUM_REQUESTS)
    return [_sample(f"request-{number:02d}", prompts[place]) for number, place in enumerate(order)]


def _sample(key: str, ids: np.ndarray) -> Sample:
    mask = np.ones(len(ids), np.uint8)
    return Sample(key, "probe", "train", ids.astype(np.int32), mask, len(ids), "length")


@dataclass(frozen=True)
class RequestProblem:
    """A request whose states are not its own."""

    key: str
    text: str


def stored_states(stored: CapturedSample) -> torch.Tensor:
    """All states [S, L, H] of a sample captured with the policy `all`, the final layer last."""
    return torch.cat([stored.aux_states, stored.final_states[:, None]], dim=1)


def request_problems(
    stored: Sequence[CapturedSample],
    sent: Sequence[Sample],
    references: Sequence[torch.Tensor],
    limits: Sequence[float],
) -> list[RequestProblem]:
    """Requests that did not get their own states back, each with what it got instead if that can be told.

    Args:
        stored: what the engine returned, in the order of `sent`.
        sent: the requests.
        references: the states [S, L, H] that each must have, by the captured ids.
        limits: [L] the distance from which on a row is foreign, for each captured id.
    """
    problems = []
    for index, (found, sample) in enumerate(zip(stored, sent, strict=True)):
        if found.key != sample.key or found.input_ids.tolist() != sample.input_ids.tolist():
            problems.append(RequestProblem(sample.key, f"holds the token ids of {found.key}"))
            continue
        states = stored_states(found)
        if foreign_rows(states, references[index], limits) <= MAX_FOREIGN_FRACTION * len(sample):
            continue
        problems.append(RequestProblem(sample.key, _whose(states, index, sent, references, limits)))
    return problems


def foreign_rows(states: torch.Tensor, reference: torch.Tensor, limits: Sequence[float]) -> int:
    """Rows of states [S, L, H] that are not those of the reference, in any layer; NaN counts as foreign."""
    near = relative_errors(states, reference) <= torch.tensor(limits)
    return int((~near).any(dim=1).sum())


def _whose(
    states: torch.Tensor,
    own: int,
    sent: Sequence[Sample],
    references: Sequence[torch.Tensor],
    limits: Sequence[float],
) -> str:
    rows = foreign_rows(states, references[own], limits)
    told = f"{rows} of {len(states)} rows are not its own"
    for other, reference in enumerate(references):
        common = min(len(states), len(reference))
        if other == own or common < 2:
            continue
        if foreign_rows(states[:common], reference[:common], limits) <= MAX_FOREIGN_FRACTION * common:
            return f"{told}: they are those of {sent[other].key}"
    return told
