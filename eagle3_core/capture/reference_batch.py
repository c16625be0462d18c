"""Several sequences in one transformers forward, with the results of single ones.

Legend: B rows of the batch, S tokens of a row.

Two sequences, a of three tokens and b of two:

    padded   input_ids     a0 a1 a2          packed   input_ids     a0 a1 a2 b0 b1
                           b0 b1 b1                   position_ids   0  1  2  0  1
             attention_mask 1  1  1
                            1  1  0

Padding is on the right: a causal model never sees it from a real token. In a packed row positions start again
with each sequence; without a mask and a cache transformers attends within sequences only, where a model tells
its mask of the positions. Some (gpt-oss) do not, and are given the masks of their kinds of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from eagle3_core.errors import CaptureError
from eagle3_core.target.architecture import FULL, SLIDING
from eagle3_core.target.info import TargetInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batching = Literal["single", "padded", "packed"]
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")
"""RoPE whose frequencies depend on the longest sequence of a batch."""
PACKABLE_LAYERS = {FULL, SLIDING, "chunked_attention"}
"""Layers that attend by a mask; recurrent ones carry their state from one sequence into the next."""


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward, and where each sequence lies in its output.

    Attributes:
        input_ids: [B, S] int64.
        attention_mask: [B, S] int64, or None where every token is real.
        position_ids: [B, S] int64, or None where each row starts at 0 and goes on.
        places: for each sequence its row and its tokens in that row.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    places: tuple[tuple[int, slice], ...]

    def inputs(self) -> dict[str, torch.Tensor]:
        """What the forward takes, without what it would assume by itself."""
        named = {"attention_mask": self.attention_mask, "position_ids": self.position_ids}
        return {"input_ids": self.input_ids} | {k: v for k, v in named.items() if v is not None}


def check_batching(info: TargetInfo, batching: Batching) -> None:
    """Refuse to batch a target whose results would depend on the batch.

    Raises:
        CaptureError: names what stands against it.
    """
    remedy = "set capture.reference_batching to single"
    rope = [part.kind for part in info.rope if part.kind in LENGTH_DEPENDENT_ROPE]
    if batching != "single" and rope:
        raise CaptureError(
            f"{info.path} has RoPE of the kind {rope[0]}, which depends on the longest sequence of a batch",
            remedy=remedy,
        )
    kinds = set(info.attention.layer_kinds) - PACKABLE_LAYERS if info.attention else set()
    if batching == "packed" and kinds:
        raise CaptureError(
            f"{info.path} has layers of {', '.join(sorted(kinds))}, which would run on from one packed "
            "sequence into the next",
            remedy=f"{remedy} or padded",
        )


def plan_batches(lengths: Sequence[int], max_tokens: int, batching: Batching) -> list[list[int]]:
    """Indices of sequences by batch, each of at most `max_tokens` (padding counted) or of one sequence.

    Padded batches take sequences of similar length together; packed ones keep the order.
    """
    order = list(range(len(lengths)))
    if batching == "padded":
        order.sort(key=lambda index: lengths[index])
    batches: list[list[int]] = []
    width = total = 0
    for index in order:
        width, total = max(width, lengths[index]), total + lengths[index]
        used = total if batching == "packed" else width * (len(batches[-1]) + 1 if batches else 1)
        if not batches or batching == "single" or used > max_tokens:
            batches.append([])
            width = total = lengths[index]
        batches[-1].append(index)
    return batches


def make_batch(sequences: Sequence[torch.Tensor], batching: Batching) -> Batch:
    """Lay out sequences of ids [S] for one forward; `single` takes exactly one."""
    if batching == "packed":
        return _pack(sequences)
    assert batching == "padded" or len(sequences) == 1, len(sequences)
    return _pad(sequences)


def _pad(sequences: Sequence[torch.Tensor]) -> Batch:
    longest = max(map(len, sequences))
    ids = torch.stack([torch.cat([ids, ids[-1:].expand(longest - len(ids))]).long() for ids in sequences])
    positions = torch.arange(longest)
    mask = torch.stack([(positions < len(ids)).long() for ids in sequences])
    return Batch(
        input_ids=ids,
        attention_mask=None if bool(mask.all()) else mask,
        position_ids=None,
        places=tuple((row, slice(0, len(ids))) for row, ids in enumerate(sequences)),
    )


def _pack(sequences: Sequence[torch.Tensor]) -> Batch:
    places, start = [], 0
    for ids in sequences:
        places.append((0, slice(start, start + len(ids))))
        start += len(ids)
    return Batch(
        input_ids=torch.cat([ids.long() for ids in sequences])[None],
        attention_mask=None,
        position_ids=torch.cat([torch.arange(len(ids)) for ids in sequences])[None],
        places=tuple(places),
    )


def can_make_masks(model: PreTrainedModel) -> bool:
    """Whether `packed_masks` knows all kinds of a model's layers."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(kinds) and set(kinds) <= {FULL, SLIDING}


def packed_masks(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor
) -> dict[str, Any]:
    """The masks of one packed row [1, S] by kind of layer, made by transformers' own functions."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = model.config.get_text_config()
    facts: dict[str, Any] = {
        "config": config,
        "inputs_embeds": model.get_input_embeddings()(input_ids),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": position_ids,
    }
    makers = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}
    return {kind: makers[kind](**facts) for kind in set(config.layer_types)}
