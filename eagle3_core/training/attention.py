"""Attention of a TTT step: causal over the first block, plus one key of its own row for each later block.

Legend: N query rows, R rows of the pack, h query heads, g key/value heads, d head size, J later blocks.

At step k a query sees the first block causally within its document and its own row in blocks 1 to k. The
first block is attended once with its log-sum-exp, and the J diagonal terms are merged exactly:

    lse = log(exp(lse_first) + sum_j exp(s_j))      s_j = scale * q . k_j
    out = exp(lse_first - lse) * out_first + sum_j exp(s_j - lse) * v_j

The backward pass of a block needs only the merged output and the merged log-sum-exp, because the softmax
weights are exp(score - lse) whatever else was in the sum (the same fact as in ring attention, Liu et al.
2023, arXiv 2310.01889). So nothing of size N x R is kept and no cache grows with the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3_core.training.rows import Run

MAX_SCORES = 1 << 22
"""Query-key pairs of one head that a kernel is given at once; longer runs are cut to bound memory."""


def merged_attention(
    queries: Tensor,
    first: tuple[Tensor, Tensor],
    later: Sequence[tuple[Tensor, Tensor]],
    runs: tuple[Run, ...],
    scale: float,
) -> Tensor:
    """Attention of one step.

    Args:
        queries: [N, h, d], in the compute dtype.
        first: keys and values of the first block, [R, g, d] each.
        later: keys and values of each later block at the query rows, [N, g, d] each.
        runs: which first-block rows each query sees.
        scale: factor of the scores.

    Returns:
        [N, h, d] in the dtype of `queries`.
    """
    keys = torch.stack([key for key, _ in later], dim=1) if later else None
    values = torch.stack([value for _, value in later], dim=1) if later else None
    return _MergedAttention.apply(queries, *first, keys, values, runs, scale)


class _MergedAttention(torch.autograd.Function):
    """Forward and backward of `merged_attention`; later keys and values are [N, J, g, d] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        first_keys: Tensor,
        first_values: Tensor,
        later_keys: Tensor | None,
        later_values: Tensor | None,
        runs: tuple[Run, ...],
        scale: float,
    ) -> Tensor:
        out = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
        lse = torch.full(queries.shape[:2], -torch.inf, dtype=torch.float32, device=queries.device)
        for run in _pieces(runs):
            rows, cols = slice(run.query_start, run.query_end), slice(run.key_start, run.key_end)
            part = _first_block(queries[rows], first_keys[cols], first_values[cols], scale)
            out[rows], lse[rows] = part
        if later_keys is not None and later_values is not None:
            out, lse = _merge(out, lse, queries, later_keys, later_values, scale)
        out = out.to(queries.dtype)
        ctx.save_for_backward(queries, first_keys, first_values, later_keys, later_values, out, lse)
        ctx.runs, ctx.scale = runs, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        queries, first_keys, first_values, later_keys, later_values, out, lse = ctx.saved_tensors
        grad_out = grad_out.to(queries.dtype)
        grad_queries = torch.zeros_like(queries)
        grad_keys, grad_values = torch.zeros_like(first_keys), torch.zeros_like(first_values)
        for run in _pieces(ctx.runs):
            rows, cols = slice(run.query_start, run.query_end), slice(run.key_start, run.key_end)
            dq, dk, dv = _first_block_backward(
                grad_out[rows], queries[rows], first_keys[cols], first_values[cols], out[rows], lse[rows],
                ctx.scale,
            )  # fmt: skip
            grad_queries[rows] += dq
            grad_keys[cols] += dk
            grad_values[cols] += dv
        grad_later_keys = grad_later_values = None
        if later_keys is not None:
            dq, grad_later_keys, grad_later_values = _merge_backward(
                grad_out, queries, later_keys, later_values, out, lse, ctx.scale
            )
            grad_queries += dq
        return grad_queries, grad_keys, grad_values, grad_later_keys, grad_later_values, None, None


def _diagonal_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[N, g, h/g, J] scores of each row with its own later keys."""
    grouped = _grouped(queries, keys.shape[2])
    return scale * torch.einsum("ngqd,njgd->ngqj", grouped.float(), keys.float())


def _merge(
    out: Tensor, lse: Tensor, queries: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Add the diagonal terms to a first-block result; shapes as in the module's formula."""
    scores = _diagonal_scores(queries, keys, scale)
    first = lse.view(scores.shape[:-1])
    total = torch.logaddexp(first, torch.logsumexp(scores, dim=-1))
    weights = torch.exp(scores - total.unsqueeze(-1))
    merged = torch.exp(first - total).unsqueeze(-1) * _grouped(out, keys.shape[2])
    merged = merged + torch.einsum("ngqj,njgd->ngqd", weights, values.float())
    return merged.reshape(out.shape), total.view(lse.shape)


def _merge_backward(
    grad_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the diagonal terms: queries [N, h, d], later keys and values [N, J, g, d]."""
    groups = keys.shape[2]
    scores = _diagonal_scores(queries, keys, scale)
    weights = torch.exp(scores - lse.view(scores.shape[:-1]).unsqueeze(-1))
    grad, grouped = _grouped(grad_out, groups).float(), _grouped(queries, groups).float()
    mean = (grad * _grouped(out, groups)).sum(-1, keepdim=True)
    grad_scores = scale * weights * (torch.einsum("ngqd,njgd->ngqj", grad, values.float()) - mean)
    grad_queries = torch.einsum("ngqj,njgd->ngqd", grad_scores, keys.float()).reshape(queries.shape)
    grad_keys = torch.einsum("ngqj,ngqd->njgd", grad_scores, grouped)
    grad_values = torch.einsum("ngqj,ngqd->njgd", weights, grad)
    return grad_queries.to(queries.dtype), grad_keys.to(keys.dtype), grad_values.to(values.dtype)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[N, h, d] as [N, g, h/g, d]: the query heads that share a key head side by side."""
    return tensor.view(len(tensor), groups, -1, tensor.shape[-1])


def _folded(tensor: Tensor, groups: int) -> Tensor:
    """[Q, h, d] as [1, g, h/g * Q, d]: query heads that share a key head become more queries of it."""
    return _grouped(tensor, groups).permute(1, 2, 0, 3).flatten(1, 2).unsqueeze(0).contiguous()


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


def _bias(num_queries: int, num_keys: int, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[repeats * Q, C]: 0 where a query sees a key, else -inf; the last query sees all keys."""
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)
    bias = torch.zeros(num_queries, num_keys, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
    return bias.repeat(repeats, 1)


def _first_block(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One run: output [Q, h, d] and log-sum-exp [Q, h] in fp32."""
    groups, count = keys.shape[1], len(queries)
    folded = _folded(queries, groups)
    bias = _bias(count, len(keys), queries.shape[1] // groups, queries.dtype, queries.device)
    out, lse = _forward_kernel(folded, _heads_first(keys), _heads_first(values), bias, scale)
    return _unfolded(out, count).float(), _unfolded(lse.unsqueeze(-1).contiguous(), count).squeeze(-1)


def _first_block_backward(
    grad_out: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one run, in the shapes of queries, keys and values."""
    groups, count = keys.shape[1], len(queries)
    bias = _bias(count, len(keys), queries.shape[1] // groups, queries.dtype, queries.device)
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
