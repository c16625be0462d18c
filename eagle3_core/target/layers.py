"""The one home of the layer-id convention.

A capture id k is the hidden state that enters decoder layer k, that is the output of layer k-1: 0 is the
embedding output, N (the number of layers) the output of the last layer before the final norm. This is vLLM's
convention, and that of transformers' `hidden_states[k]` for k < N (its last entry is after the norm).

Four layers, ids in this convention:

    embedding -> [0] layer 0 -> [1] layer 1 -> [2] layer 2 -> [3] layer 3 -> [4] final norm -> LM head
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from eagle3_core.errors import TargetError

NUM_AUX_LAYERS = 3
"""A Llama-type EAGLE-3 draft reads exactly three auxiliary states in vLLM."""


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """(2, N//2, N-3), the layers EAGLE-3 drafts usually read.

    Raises:
        TargetError: the target is so small that they collide or leave the model.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if not 0 <= ids[0] < ids[1] < ids[2] < num_layers:
        raise TargetError(
            f"a target with {num_layers} layers is too small for the default auxiliary layer ids {ids}",
            expected="three increasing ids",
            remedy=f"set target.aux_layer_ids to {NUM_AUX_LAYERS} distinct ids from 0 to {num_layers - 1}",
        )
    return ids


def resolve_aux_layer_ids(wanted: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """The auxiliary capture ids of a run, increasing.

    Args:
        wanted: ids from the configuration, or None for the default.
        num_layers: N, decoder layers of the target.

    Raises:
        TargetError: duplicates, ids out of range, not increasing, or not three of them.
    """
    if wanted is None:
        return default_aux_layer_ids(num_layers)
    ids = tuple(wanted)
    problems = [f"{k} is no layer" for k in ids if not 0 <= k < num_layers]
    problems += [f"{k} is there {count} times" for k, count in Counter(ids).items() if count > 1]
    if list(ids) != sorted(ids):
        problems.append("not increasing")
    if len(ids) != NUM_AUX_LAYERS:
        problems.append(f"{len(ids)} ids")
    if problems:
        raise TargetError(
            f"target.aux_layer_ids {list(ids)} cannot be captured ({', '.join(problems)})",
            expected=f"{NUM_AUX_LAYERS} distinct, increasing ids from 0 to {num_layers - 1}",
        )
    return ids


def source_layer(capture_id: int) -> int | None:
    """The decoder layer whose output is the state of a capture id; None for id 0, the embedding's output."""
    return capture_id - 1 if capture_id > 0 else None


def final_layer_id(num_layers: int) -> int:
    """The capture id of the final state (before the final norm)."""
    return num_layers
