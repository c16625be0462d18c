"""The training-time test (TTT): the draft unrolled for several steps on a pack of documents.

Legend: R rows of a pack, A auxiliary layers, H hidden size, N_k rows computed at step k, M_k loss rows of
step k, T TTT steps, h query heads, g key/value heads, d head size.

Equal to the forward of speculators' `Eagle3DraftModel`, computed on fewer rows (see `rows` for the alignment
and an example of five tokens). Each step feeds the last layer's output of the step before, and the true next
token, back in; a row attends to the first block up to itself and to its own row in later blocks. In the last
layer, rows without loss at this or a later step only contribute keys and values of the first block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from eagle3_core.training.attention import merged_attention
from eagle3_core.training.rows import RowPlan, Run


@dataclass(frozen=True)
class Pack:
    """Documents side by side, as the draft reads them.

    Attributes:
        keys: keys of the samples.
        input_ids: [R] int64, x[t+1].
        aux_states: [R, A * H], g[t], the auxiliary layers side by side.
        positions: [R] int64, t + 1 inside the document.
        final_states: [n, H], the teacher's states before the final norm, y[t+1] of the label rows.
        plan: which rows are computed and compared.
    """

    keys: tuple[str, ...]
    input_ids: Tensor
    aux_states: Tensor
    positions: Tensor
    final_states: Tensor
    plan: RowPlan

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, one more than their rows each."""
        return len(self.input_ids) + len(self.keys)

    def to(self, device: torch.device) -> Pack:
        """The pack with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            aux_states=self.aux_states.to(device),
            positions=self.positions.to(device),
            final_states=self.final_states.to(device),
        )


@dataclass
class _Memory:
    """Keys and values of one layer: the first block's, and each later block's at the current rows."""

    first: tuple[Tensor, Tensor] | None = None
    later: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def keep(self, kept: Tensor) -> None:
        """Leave out the rows that later steps do not compute."""
        self.later = [(keys[kept], values[kept]) for keys, values in self.later]

    def add(self, keys: Tensor, values: Tensor) -> None:
        if self.first is None:
            self.first = (keys, values)
        else:
            self.later.append((keys, values))


@dataclass(frozen=True)
class _Rotary:
    """Cosines and sines of every position that a pack and its steps reach, [P, d] each."""

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 1, d] factors of the given positions."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def ttt_forward(draft: Any, pack: Pack, dtype: torch.dtype) -> list[Tensor]:
    """Unroll the draft over the plan's steps.

    Args:
        draft: an `Eagle3DraftModel`; only its submodules are used.
        pack: the documents; its plan says how many steps.
        dtype: compute dtype of matrix products; the residual stream and norms stay in fp32.

    Returns:
        For each step the normalised hidden states of its loss rows, [M_k, H] in fp32: what the LM head reads.
    """
    device = pack.input_ids.device
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        hidden = fuse_aux_states(draft, pack.aux_states)
        rotary = _rotary(draft, int(pack.positions.max()) + len(pack.plan.steps), device)
        memories = [_Memory() for _ in draft.layers]
        outputs = []
        for number, step in enumerate(pack.plan.steps):
            rows, kept = _index(step.rows, device), _index(step.kept, device)
            if number == 0:
                hidden = _first_step(draft, pack, hidden, rows, memories, rotary, dtype)
            else:
                for memory in memories:
                    memory.keep(kept)
                embeds = draft.embed_tokens(pack.input_ids[rows + number])
                hidden = _later_step(
                    draft, embeds, hidden[kept], pack.positions[rows] + number, step.runs, memories, rotary,
                    dtype,
                )  # fmt: skip
            normal = draft.norm(hidden)
            if draft.config.norm_output:
                hidden = normal
            outputs.append(normal[_index(step.loss, device)])
    return outputs


def fuse_aux_states(draft: Any, aux_states: Tensor) -> Tensor:
    """The draft's first hidden state, [R, H] in fp32, from the auxiliary states [R, A * H]."""
    aux_states = normalise_aux_states(draft, aux_states)
    if not torch.is_autocast_enabled(aux_states.device.type):
        aux_states = aux_states.to(draft.fc.weight.dtype)
    return draft.fc(aux_states).float()


def normalise_aux_states(draft: Any, aux_states: Tensor) -> Tensor:
    """What `fc` reads, [R, A * H]: the auxiliary states, normalised together, each on its own, or not."""
    if draft.input_norm is not None:
        aux_states = draft.input_norm(aux_states)
    if draft.fc_norm is not None:
        chunks = aux_states.chunk(len(draft.fc_norm), dim=-1)
        aux_states = torch.cat(
            [norm(chunk) for norm, chunk in zip(draft.fc_norm, chunks, strict=True)], dim=-1
        )
    return aux_states


def _index(rows: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(rows).to(device)


def _rotary(draft: Any, last: int, device: torch.device) -> _Rotary:
    positions = torch.arange(last + 1, device=device).unsqueeze(0)
    cos, sin = draft.rotary_emb(torch.zeros(1, device=device), positions)
    return _Rotary(cos[0], sin[0])


def _first_step(
    draft: Any,
    pack: Pack,
    hidden: Tensor,
    rows: Tensor,
    memories: list[_Memory],
    rotary: _Rotary,
    dtype: torch.dtype,
) -> Tensor:
    """Step 0: every row in all layers but the last, whose queries are `rows` only; returns [N_0, H]."""
    embeds: Tensor | None = draft.embed_tokens(pack.input_ids)
    for number, (layer, memory) in enumerate(zip(draft.layers, memories, strict=True)):
        is_last = number == len(memories) - 1
        hidden = _layer(
            layer,
            hidden,
            embeds,
            pack.positions,
            rows if is_last else None,
            pack.plan.steps[0].runs if is_last else pack.plan.all_rows,
            memory,
            rotary,
            dtype,
        )
        embeds = None
    return hidden


def _later_step(
    draft: Any,
    embeds: Tensor | None,
    hidden: Tensor,
    positions: Tensor,
    runs: tuple[Run, ...],
    memories: list[_Memory],
    rotary: _Rotary,
    dtype: torch.dtype,
) -> Tensor:
    """A step after the first, on its own rows only; returns [N_k, H]."""
    for layer, memory in zip(draft.layers, memories, strict=True):
        hidden = _layer(layer, hidden, embeds, positions, None, runs, memory, rotary, dtype)
        embeds = None
    return hidden


def _layer(
    layer: Any,
    hidden: Tensor,
    embeds: Tensor | None,
    positions: Tensor,
    queries: Tensor | None,
    runs: tuple[Run, ...],
    memory: _Memory,
    rotary: _Rotary,
    dtype: torch.dtype,
) -> Tensor:
    """One decoder layer.

    Args:
        layer: speculators' first layer if `embeds` is given, else an ordinary Llama layer.
        hidden: [N, H] residual stream.
        embeds: [N, H] embeddings of the tokens read, or None.
        positions: [N].
        queries: indices of the rows that are computed on; None for all. Keys and values come from all N.
        runs: first-block attention of the queries.
        memory: the layer's keys and values; this block's are added.
    """
    attention = layer.self_attn
    if embeds is None:
        inputs, residual = layer.input_layernorm(hidden), hidden
    else:
        normal = layer.hidden_norm(hidden)
        residual = normal if layer.norm_before_residual else hidden
        inputs = torch.cat([layer.input_layernorm(embeds), normal], dim=-1)
    inputs = inputs.to(dtype)
    turn = rotary.at(positions)
    keys = _rotate(_heads(attention.k_proj(inputs), attention.head_dim), *turn)
    memory.add(keys.to(dtype), _heads(attention.v_proj(inputs), attention.head_dim).to(dtype))
    if queries is not None:
        inputs, residual, turn = inputs[queries], residual[queries], rotary.at(positions[queries])
    wanted = _rotate(_heads(attention.q_proj(inputs), attention.head_dim), *turn).to(dtype)
    assert memory.first is not None
    mixed = merged_attention(wanted, memory.first, memory.later, runs, attention.scaling)
    hidden = residual + attention.o_proj(mixed.flatten(1))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _heads(states: Tensor, head_dim: int) -> Tensor:
    """[N, heads * d] as [N, heads, d]."""
    return states.view(len(states), -1, head_dim)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [N, heads, d]; pairs are half a head apart, as in Llama."""
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-right, left], dim=-1) * sin
