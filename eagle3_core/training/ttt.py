"""The training-time test (TTT): the draft unrolled for several steps on a pack of documents.

Legend: R rows of a pack, A auxiliary layers, H hidden size, N_k rows computed at step k, M_k loss rows of
step k, T TTT steps, h query heads, g key/value heads, d head size.

Equal to the forward of speculators' `Eagle3DraftModel`, computed on fewer rows (see `rows` for the alignment
and an example of five tokens). Each step feeds the last layer's output of the step before, and the true next
token, back in; a row attends to the first block up to itself and to its own row in later blocks. In the last
layer, rows without loss at this or a later step only contribute keys and values of the first block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3_core.training.heads import Turn
from eagle3_core.training.layer import DraftLayer
from eagle3_core.training.matrices import Matrix, cast, linear
from eagle3_core.training.pointwise import Routes, add_norm, rms_norm, take
from eagle3_core.training.row_index import index_rows
from eagle3_core.training.rows import RowPlan


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
        argmax: [n] int32 on the CPU, the target's choice over its full vocabulary; None without labels.
        share: [n] fp32 on the CPU, the draft vocabulary's share of the target's probability; None likewise.
        sent: when its tensors are on the GPU to which they are being copied; None if they are where they are.
    """

    keys: tuple[str, ...]
    input_ids: Tensor
    aux_states: Tensor
    positions: Tensor
    final_states: Tensor
    plan: RowPlan
    argmax: Tensor | None = None
    share: Tensor | None = None
    sent: torch.cuda.Event | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, one more than their rows each."""
        return len(self.input_ids) + len(self.keys)

    def to(self, device: torch.device) -> Pack:
        """The pack with its tensors on `device`; without waiting from pinned memory, or if it was sent."""
        if self.sent is not None:
            return self._received().to(device)
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            aux_states=self.aux_states.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            final_states=self.final_states.to(device, non_blocking=True),
        )

    def _received(self) -> Pack:
        """The pack for the current stream, which waits for the copy and keeps its memory while it works."""
        stream = torch.cuda.current_stream(self.aux_states.device)
        stream.wait_event(self.sent)
        for tensor in (self.input_ids, self.aux_states, self.positions, self.final_states):
            tensor.record_stream(stream)
        return replace(self, sent=None)


def ttt_forward(draft: Any, pack: Pack, dtype: torch.dtype) -> list[Tensor]:
    """Unroll the draft over the plan's steps.

    Its backward pass can run once: gradients are gathered in buffers of this forward.

    Args:
        draft: an `Eagle3DraftModel`; only its submodules are used.
        pack: the documents; its plan says how many steps.
        dtype: compute dtype of matrix products; the residual stream and norms stay in fp32.

    Returns:
        For each step the normalised hidden states of its loss rows, [M_k, H] in `dtype` (fp32 if the draft
        feeds them to the next step): what the LM head reads.

    Raises:
        TrainingError: a layer has a bias or an activation that this forward does not know.
    """
    index = index_rows(pack.plan, pack.input_ids.device)
    layers = [
        DraftLayer(draft, number, index, len(index.steps), dtype) for number in range(len(draft.layers))
    ]
    layers[0].read_tokens(_unit_embeddings(draft, pack.input_ids, dtype))
    cos, sin = _rotary(draft, index.last_position, pack.input_ids.device)
    hidden = fuse_aux_states(draft, pack.aux_states, dtype)
    outputs = []
    for number, step in enumerate(index.steps):
        positions = pack.positions if number == 0 else pack.positions.index_select(0, step.rows) + number
        turn, delta = Turn(cos, sin, positions), None
        for layer in layers:
            hidden, delta = layer(number, step, hidden, delta, turn)
        assert delta is not None
        hidden, normal = _leave(draft, hidden, delta, step.routes, dtype)
        outputs.append(normal)
    empty = hidden.new_zeros(0, hidden.shape[1], dtype=dtype)
    return outputs + [empty] * (len(pack.plan.steps) - len(outputs))


def _leave(
    draft: Any, hidden: Tensor, delta: Tensor, routes: Routes, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What the next step starts from, [L, H] in fp32, and what the LM head reads, [M, H]."""
    norm = draft.norm
    if not draft.config.norm_output:
        return add_norm(hidden, delta, norm.weight, norm.variance_epsilon, dtype, None, routes)
    _, normal = add_norm(hidden, delta, norm.weight, norm.variance_epsilon, torch.float32)
    return take(normal, routes.after), take(normal, routes.loss)


def fuse_aux_states(draft: Any, aux_states: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The draft's first hidden state, [R, H] in fp32, from the auxiliary states [R, A * H]."""
    states = normalise_aux_states(draft, aux_states).to(dtype)
    matrix = Matrix(draft.fc.weight.shape, 0, dtype, states.device)
    return linear(states, cast(matrix, dtype, draft.fc.weight), matrix).float()


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


def _unit_embeddings(draft: Any, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, H] embeddings of the tokens read, with a mean square of 1."""
    with torch.no_grad():
        embeds = draft.embed_tokens(input_ids)
        ones = torch.ones(embeds.shape[1], device=embeds.device)
        return rms_norm(embeds, ones, draft.layers[0].input_layernorm.variance_epsilon, dtype)


def _rotary(draft: Any, last: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 to `last`, [last + 1, d] each, in fp32."""
    positions = torch.arange(last + 1, device=device).unsqueeze(0)
    cos, sin = draft.rotary_emb(torch.zeros(1, device=device), positions)
    return cos[0], sin[0]
