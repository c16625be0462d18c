"""Causal attention over the first block, with its log-sum-exp; one call for all documents where possible.

Legend: S query rows, N those that a step computes, R rows of the pack, C keys of a run, h query heads,
g key/value heads, d head size.

On CUDA torch's flash attention takes all documents at once. Its causal mask sees the last query beside the
last key of a document (bottom right), so the queries of a document must be its last rows without a gap: rows
that a step does not compute are filled with zeros between its first row and the document's end. They change
nothing, because the gradient by their output is zero. `flash_is_usable` holds the alignment against a plain
softmax before the first use.

On the CPU, in fp32 and where that check fails, each run of rows is attended on its own.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3_core.training.rows import Run

logger = logging.getLogger(__name__)
MAX_SCORES = 1 << 22
"""Query-key pairs of one head that a kernel is given at once; longer runs are cut to bound memory."""
FLASH_TOLERANCE = 0.02


@dataclass(frozen=True)
class Hull:
    """The rows that flash attention is given: for each document its last rows, from the first one needed.

    Attributes:
        places: [N] int64, where the queries stand in the hull; None if they are the hull.
        size: rows of the hull.
        query_ends, key_ends: [documents + 1] int32, cumulative rows of hull and keys.
        max_queries, max_keys: of a document.
    """

    places: Tensor | None
    size: int
    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int


@dataclass(frozen=True)
class FirstBlock:
    """Which first-block rows the queries of a step see.

    Attributes:
        runs: of consecutive queries.
        hull: the same for flash attention, on the device; None attends run by run.
        window: rows that a query sees, its own included; None is all.
    """

    runs: tuple[Run, ...]
    hull: Hull | None = None
    window: int | None = None

    @property
    def places(self) -> Tensor | None:
        """[N], where the queries stand in the hull; None if there is no hull or they are all of it."""
        return None if self.hull is None else self.hull.places


def forward(
    queries: Tensor, keys: Tensor, values: Tensor, block: FirstBlock, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [S, h, d], and log-sum-exp [h, S] in fp32.

    Args:
        queries: [S, h, d]; zero between the rows of a hull.
        keys, values: [R, g, d].
        block: who sees whom.
        scale: factor of the scores.
    """
    if block.hull is not None:
        return _flash_forward(queries, keys, values, block.hull, block.window, scale)
    out = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
    lse = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float32, device=queries.device)
    for run in _pieces(block.runs):
        rows, cols = slice(run.query_start, run.query_end), slice(run.key_start, run.key_end)
        out[rows], lse[rows] = _run(queries[rows], keys[cols], values[cols], scale, block.window)
    return out, lse.T.contiguous()


def backward(
    grad_out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    block: FirstBlock,
    scale: float,
    sums: tuple[Tensor, Tensor],
) -> Tensor:
    """Gradient by the queries, [S, h, d]; those by keys and values are added to `sums`, [R, g, d] fp32 each.

    `out` [S, h, d] and `lse` [h, S] may include other blocks; `grad_out` is zero between the rows of a hull.
    """
    grad_keys, grad_values = sums
    if block.hull is not None:
        found = _flash_backward(grad_out, queries, keys, values, out, lse, block.hull, block.window, scale)
        grad_keys += found[1]
        grad_values += found[2]
        return found[0]
    grad_queries = torch.zeros_like(queries)
    by_row = lse.T
    for run in _pieces(block.runs):
        rows, cols = slice(run.query_start, run.query_end), slice(run.key_start, run.key_end)
        dq, dk, dv = _run_backward(
            grad_out[rows], queries[rows], keys[cols], values[cols], out[rows], by_row[rows], scale,
            block.window,
        )  # fmt: skip
        grad_queries[rows] += dq
        grad_keys[cols] += dk
        grad_values[cols] += dv
    return grad_queries


def _flash_forward(
    queries: Tensor, keys: Tensor, values: Tensor, hull: Hull, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        queries, keys, values, hull.query_ends, hull.key_ends, hull.max_queries, hull.max_keys,
        0.0, True, False, scale=scale, **_window(window),
    )  # fmt: skip
    return out, lse


def _flash_backward(
    grad_out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    hull: Hull,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(2, dtype=torch.uint64, device=queries.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out, queries, keys, values, out, lse, hull.query_ends, hull.key_ends, hull.max_queries,
        hull.max_keys, 0.0, True, unused, unused, scale=scale, **_window(window),
    )  # fmt: skip


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


@functools.cache
def flash_is_usable(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash attention runs here and aligns its causal mask at the bottom right.

    Held against a plain softmax, gradients included, on documents of 1, 70 and 150 keys with fewer queries.
    """
    if (
        device.type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or head_dim % 8
        or head_dim > 256
    ):
        return False
    try:
        error = _flash_error(device, dtype, head_dim)
    except (RuntimeError, NotImplementedError) as problem:
        logger.warning(
            "torch's flash attention does not run on this GPU (%s); using plain attention", problem
        )
        return False
    if not error < FLASH_TOLERANCE:
        logger.warning("torch's flash attention differs by %.3g here; using plain attention, slowly", error)
    return error < FLASH_TOLERANCE


def _flash_error(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    """Largest relative distance of output, log-sum-exp and gradients from those of a plain softmax."""
    counts, lengths = (1, 3, 130), (1, 70, 150)
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(counts), 4, head_dim)] * 2 + [(sum(lengths), 2, head_dim)] * 2
    draw = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    queries, grad_out, keys, values = draw
    ends = [
        torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
        for sizes in ((0, *counts), (0, *lengths))
    ]
    hull = Hull(None, sum(counts), ends[0], ends[1], max(counts), max(lengths))
    scale = 0.5 * head_dim**-0.5
    out, lse = _flash_forward(queries, keys, values, hull, None, scale)
    found = [out, lse.T, *_flash_backward(grad_out, queries, keys, values, out, lse, hull, None, scale)]
    starts = [(sum(counts[:i]), sum(lengths[:i])) for i in range(len(counts))]
    runs = tuple(Run(q, q + n, k, k + m) for (q, k), n, m in zip(starts, counts, lengths, strict=True))
    wide, plain = [tensor.float() for tensor in (queries, keys, values)], FirstBlock(runs)
    sums = (torch.zeros_like(wide[1]), torch.zeros_like(wide[2]))
    out, lse = forward(wide[0], wide[1], wide[2], plain, scale)
    dq = backward(grad_out.float(), wide[0], wide[1], wide[2], out, lse, plain, scale, sums)
    wanted = [out, lse.T, dq, *sums]
    return max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def _folded(tensor: Tensor, groups: int) -> Tensor:
    """[Q, h, d] as [1, g, h/g * Q, d]: query heads that share a key head become more queries of it."""
    grouped = tensor.reshape(len(tensor), groups, -1, tensor.shape[-1])
    return grouped.permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0).contiguous()


def _unfolded(tensor: Tensor, num_queries: int) -> Tensor:
    """The inverse of `_folded`."""
    groups, depth = tensor.shape[1], tensor.shape[-1]
    return tensor.view(groups, -1, num_queries, depth).permute(2, 0, 1, 3).reshape(num_queries, -1, depth)


def _pieces(runs: tuple[Run, ...]) -> Iterator[Run]:
    """The runs, long ones cut into shorter ones with fewer keys."""
    for run in runs:
        size = max(1, MAX_SCORES // (run.key_end - run.key_start))
        for start in range(run.query_start, run.query_end, size):
            end = min(start + size, run.query_end)
            yield Run(start, end, run.key_start, run.key_end - (run.query_end - end))


def _bias(num_queries: int, num_keys: int, repeats: int, queries: Tensor, window: int | None) -> Tensor:
    """[repeats * Q, C]: 0 where a query sees a key, else -inf; the last query sees the last key."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=queries.device)
    seen = seen.tril(num_keys - num_queries)
    if window is not None:
        seen = seen.triu(num_keys - num_queries - window + 1)
    bias = torch.zeros(num_queries, num_keys, dtype=queries.dtype, device=queries.device)
    return bias.masked_fill_(~seen, -torch.inf).repeat(repeats, 1)


def _run(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """One run: output [Q, h, d] and log-sum-exp [Q, h] in fp32."""
    groups, count = keys.shape[1], len(queries)
    bias = _bias(count, len(keys), queries.shape[1] // groups, queries, window)
    out, lse = _forward_kernel(
        _folded(queries, groups), _heads_first(keys), _heads_first(values), bias, scale
    )
    return _unfolded(out, count).float(), _unfolded(lse.unsqueeze(-1).contiguous(), count).squeeze(-1)


def _run_backward(
    grad_out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one run, in the shapes of queries, keys and values."""
    groups, count = keys.shape[1], len(queries)
    bias = _bias(count, len(keys), queries.shape[1] // groups, queries, window)
    dq, dk, dv = _backward_kernel(
        _folded(grad_out, groups),
        _folded(queries, groups),
        _heads_first(keys),
        _heads_first(values),
        _folded(out, groups),
        _folded(lse.unsqueeze(-1), groups).squeeze(-1),
        bias,
        scale,
    )
    return _unfolded(dq.contiguous(), count), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _heads_first(tensor: Tensor) -> Tensor:
    """[C, g, d] as [1, g, C, d]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _forward_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """[1, g, Q, d] queries over [1, g, C, d]: output, and log-sum-exp [1, g, Q]."""
    if queries.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, False, attn_mask=bias[None, None], scale=scale
        )
    return dense_forward(queries, keys, values, bias, scale)


def _backward_kernel(
    grad_out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if queries.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, queries, keys, values, out, lse, 0.0, False, attn_mask=bias[None, None], scale=scale
        )
    return dense_backward(grad_out, queries, keys, values, out, lse, bias, scale)


def dense_forward(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Plain attention with its log-sum-exp, for devices without a kernel that returns it."""
    scores = scale * (queries @ keys.transpose(-1, -2)).float() + bias
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    return weights.to(values.dtype) @ values, lse


def dense_backward(
    grad_out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `dense_forward`, with an output and log-sum-exp that may include other blocks."""
    scores = scale * (queries @ keys.transpose(-1, -2)).float() + bias
    weights = torch.exp(scores - lse.unsqueeze(-1))
    mean = (grad_out.float() * out.float()).sum(-1, keepdim=True)
    along = (grad_out @ values.transpose(-1, -2)).float()
    grad_scores = (scale * weights * (along - mean)).to(queries.dtype)
    grad_values = weights.to(values.dtype).transpose(-1, -2) @ grad_out
    return grad_scores @ keys, grad_scores.transpose(-1, -2) @ queries, grad_values
