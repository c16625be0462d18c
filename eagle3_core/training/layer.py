"""One decoder layer of the draft, unrolled: its matrices, its memory and its step.

Legend: R rows of a pack, N_k rows computed at step k, H hidden size, I intermediate size, h query heads,
g key/value heads, d head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle3_core.errors import TrainingError
from eagle3_core.training.attention import merged_attention
from eagle3_core.training.first_block import FirstBlock, flash_is_usable
from eagle3_core.training.heads import (
    BlockMemory,
    TokenPart,
    Turn,
    rotated_queries,
    store_keys_and_values,
    token_part,
    with_tokens,
)
from eagle3_core.training.matrices import Matrix, cast, cast_halves, linear, project
from eagle3_core.training.pointwise import add_norm, carried_norm, gated, rms_norm, take
from eagle3_core.training.row_index import RowIndex, StepIndex


class DraftLayer:
    """A layer for one unrolled forward.

    Args:
        draft: an `Eagle3DraftModel`.
        number: of the layer; the first reads embeddings beside states, the last computes only needed rows.
        index: of the pack.
        num_steps: TTT steps.
        dtype: compute dtype.

    Raises:
        TrainingError: a projection has a bias, or the activation is not silu.
    """

    def __init__(self, draft: Any, number: int, index: RowIndex, num_steps: int, dtype: torch.dtype) -> None:
        layer = draft.layers[number]
        _refuse_unknown(layer, draft)
        self.layer, self.index, self.dtype = layer, index, dtype
        self.is_first = number == 0
        self.queries = index.queries if number == len(draft.layers) - 1 else None
        self.window = draft.sliding_window if number in draft.sliding_window_indices else None
        self.tokens: tuple[TokenPart, TokenPart] | None = None
        attention, mlp, device = layer.self_attn, layer.mlp, index.all_rows.device
        self.depth = attention.head_dim
        heads = len(attention.k_proj.weight) // self.depth
        self.memory = BlockMemory(num_steps, index.num_rows, heads, self.depth, dtype, device)
        later = sum(len(step.rows) for step in index.steps[1:])
        rows = later + (index.num_rows if self.queries is None else len(self.queries))
        grads = torch.is_grad_enabled()

        def matrix(weights: list[Tensor], rows: int, in_rows: int, width: int | None = None) -> Matrix:
            shape = (sum(len(weight) for weight in weights), width or weights[0].shape[1])
            return Matrix(shape, rows * grads, dtype, device, in_rows * grads)

        queries, keys = [attention.q_proj.weight], [attention.k_proj.weight, attention.v_proj.weight]
        self.split, hidden = len(queries[0]), len(attention.o_proj.weight)
        whole = later if self.queries is not None else rows
        self.in_matrix = matrix(queries + keys, whole, index.num_rows + later, hidden)
        self.out_matrix = matrix([attention.o_proj.weight], rows, rows)
        self.up_matrix = matrix([mlp.gate_proj.weight, mlp.up_proj.weight], rows, rows)
        self.down_matrix = matrix([mlp.down_proj.weight], rows, rows)
        if self.is_first:
            self._token_matrix = matrix(queries + keys, 0, 0, hidden)
            self._token_weight, self.in_weight = cast_halves(
                self._token_matrix, self.in_matrix, dtype, layer.input_layernorm.weight, *queries, *keys
            )
        else:
            self.in_weight = cast(self.in_matrix, dtype, *queries, *keys)
        self.out_weight = cast(self.out_matrix, dtype, attention.o_proj.weight)
        self.up_weight = cast(self.up_matrix, dtype, mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down_weight = cast(self.down_matrix, dtype, mlp.down_proj.weight)

    def read_tokens(self, units: Tensor) -> None:
        """Project the embeddings of all steps: [R, H], normalised to a mean square of 1."""
        wanted = units if self.queries is None else units.index_select(0, self.queries)
        weight, matrix, split = self._token_weight, self._token_matrix, self.split
        self.tokens = (
            token_part(wanted, weight, matrix, slice(0, split)),
            token_part(units, weight, matrix, slice(split, len(weight))),
        )

    def __call__(
        self, number: int, step: StepIndex, hidden: Tensor, delta: Tensor | None, turn: Turn
    ) -> tuple[Tensor, Tensor]:
        """One TTT step of the layer.

        Args:
            number: of the step.
            step: its rows.
            hidden: [N, H] fp32 residual stream, of all R rows at step 0.
            delta: [N, H], what the layer before adds to it; None for the first layer.
            turn: rotation of the N rows.

        Returns:
            The residual stream before the MLP of the rows computed, and what the MLP adds to it.
        """
        layer, dtype = self.layer, self.dtype
        queries = self.queries if number == 0 else None
        hidden, normal = self._enter(hidden, delta)
        mixed = self._attend(number, step, normal, queries, turn)
        hidden = take(hidden, queries)
        norm = layer.post_attention_layernorm
        slot = self.up_matrix.inputs.take(len(hidden))
        added = linear(mixed, self.out_weight, self.out_matrix)
        hidden, normal = add_norm(hidden, added, norm.weight, norm.variance_epsilon, dtype, slot)
        both = linear(normal, self.up_weight, self.up_matrix)
        inner = gated(both, self.down_matrix.inputs.take(len(both)))
        return hidden, linear(inner, self.down_weight, self.down_matrix)

    def _enter(self, hidden: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream, and its norm in the compute dtype."""
        layer = self.layer
        slot = self.in_matrix.inputs.take(len(hidden))
        if not self.is_first:
            assert delta is not None
            norm = layer.input_layernorm
            return add_norm(hidden, delta, norm.weight, norm.variance_epsilon, self.dtype, slot)
        norm = layer.hidden_norm
        if not layer.norm_before_residual:
            return carried_norm(hidden, norm.weight, norm.variance_epsilon, self.dtype, slot)
        hidden = rms_norm(hidden, norm.weight, norm.variance_epsilon, torch.float32)
        return hidden, hidden.to(self.dtype)

    def _attend(
        self, number: int, step: StepIndex, normal: Tensor, queries: Tensor | None, turn: Turn
    ) -> Tensor:
        """[N, h * d], attention of the step's rows; its keys and values are kept."""
        attention, depth = self.layer.self_attn, self.depth
        flat, both = project(normal, queries, self.in_weight, self.in_matrix, self.split)
        query_part, key_part = self.tokens or (None, None)
        key_rows = self.index.all_rows if number == 0 else step.tokens
        query_rows = key_rows if self.queries is None else step.token_places
        if getattr(attention, "q_norm", None) is not None:
            flat = with_tokens(flat, query_part, query_rows)
            both = with_tokens(both, key_part, key_rows)
            flat = _by_head(flat, attention.q_norm, depth)
            keys, values = both.chunk(2, dim=1)
            both = torch.cat([_by_head(keys, attention.k_norm, depth), values], dim=1)
            query_part = key_part = None
        query_turn = turn if queries is None else replace(turn, positions=turn.positions[queries])
        is_whole = number == 0 and queries is None
        block = self._block(self.index.first if is_whole else step.first)
        size = 0 if block.hull is None else block.hull.size
        wanted = rotated_queries(flat, query_part, query_rows, query_turn, block.places, size)
        places = None if number == 0 else step.rows
        wanted = store_keys_and_values(both, key_part, key_rows, turn, self.memory, number, places, wanted)
        return merged_attention(
            wanted,
            self.memory,
            self.index.all_rows if is_whole else step.rows,
            number,
            block,
            attention.scaling,
            self.out_matrix.inputs.take(len(flat)),
        )

    def _block(self, first: FirstBlock) -> FirstBlock:
        """Attention over the first block with this layer's window, by flash attention where possible."""
        usable = flash_is_usable(self.index.all_rows.device, self.dtype, self.depth)
        return replace(first, hull=first.hull if usable else None, window=self.window)


def _by_head(flat: Tensor, norm: Any, depth: int) -> Tensor:
    """RMSNorm of each head of [N, heads * d]."""
    heads = flat.reshape(-1, depth)
    return rms_norm(heads, norm.weight, norm.variance_epsilon, flat.dtype).view(flat.shape)


def _refuse_unknown(layer: Any, draft: Any) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        if (
            getattr(attention if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")) else mlp, name).bias
            is not None
        ):
            raise TrainingError(f"{name} of the draft has a bias", expected="a draft layer without biases")
    activation = draft.config.transformer_layer_config.hidden_act
    if activation != "silu":
        raise TrainingError(f"the draft's MLP has the activation {activation}", expected="silu")
