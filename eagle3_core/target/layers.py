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


def from_layer_outputs(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The capture ids of the outputs of decoder layers, as speculators v1 names them ("after layer i").

    Of a model of 61 layers (2, 30, 58, 60) are (3, 31, 59, 61).

    Raises:
        TargetError: a layer that the target does not have.
    """
    wrong = [layer for layer in layers if not 0 <= layer < num_layers]
    if wrong:
        raise TargetError(
            f"the target has no layer {wrong[0]}",
            expected=f"layers from 0 to {num_layers - 1}, counted after",
        )
    return tuple(layer + 1 for layer in layers)


def to_layer_outputs(capture_ids: Sequence[int]) -> tuple[int, ...]:
    """The decoder layers after which the states of capture ids are taken; see `from_layer_outputs`.

    Raises:
        TargetError: capture id 0, the output of the embedding, which comes after no layer.
    """
    layers = [source_layer(capture_id) for capture_id in capture_ids]
    if None in layers:
        raise TargetError(
            "capture id 0 is the output of the embedding: a format that counts after layers cannot name it",
            remedy="export in another format, or capture other layers",
        )
    return tuple(layer for layer in layers if layer is not None)


def check_capture_ids(capture_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Ids that somebody else names, as they are.

    Raises:
        TargetError: one that the target does not have.
    """
    wrong = [capture_id for capture_id in capture_ids if not 0 <= capture_id <= num_layers]
    if wrong:
        raise TargetError(f"the target has no capture id {wrong[0]}", expected=f"ids from 0 to {num_layers}")
    return tuple(capture_ids)
