"""Attention of a TTT step: causal over the first block, plus one key of its own row for each later block.

Legend: N query rows, S rows of their hull (see `first_block`), R rows of the pack, h query heads,
g key/value heads, d head size, J later blocks.

At step k a query sees the first block causally within its document and its own row in blocks 1 to k. The
first block is attended once with its log-sum-exp, and the J diagonal terms are merged exactly:

    lse = log(exp(lse_first) + sum_j exp(s_j))      s_j = scale * q . k_j
    out = exp(lse_first - lse) * out_first + sum_j exp(s_j - lse) * v_j

The backward pass of a block needs only the merged output and the merged log-sum-exp, because the softmax
weights are exp(score - lse) whatever else was in the sum (the same fact as in ring attention, Liu et al.
2023, arXiv 2310.01889). So nothing of size N x R is kept and no cache grows with the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3_core.training import first_block
from eagle3_core.training.first_block import FirstBlock
from eagle3_core.training.heads import BlockMemory


def merged_attention(
    queries: Tensor,
    memory: BlockMemory,
    rows: Tensor,
    num_later: int,
    block: FirstBlock,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one step.

    Args:
        queries: [S, h, d], in the compute dtype: those of the rows, N, or of the block's hull.
        memory: keys and values of all blocks so far; gets their gradients.
        rows: [N], rows of the pack that the queries are.
        num_later: J, later blocks that are attended to: 1 to J of the memory.
        block: which first-block rows each query sees.
        scale: factor of the scores.
        out: [N, h * d], where to write the result.

    Returns:
        [N, h * d] in the dtype of `queries`.
    """
    return _MergedAttention.apply(queries, memory, rows, num_later, block, scale, out)


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        memory: BlockMemory,
        rows: Tensor,
        num_later: int,
        block: FirstBlock,
        scale: float,
        out: Tensor | None,
    ) -> Tensor:
        first, lse = first_block.forward(queries, memory.keys[0], memory.values[0], block, scale)
        shape, places = (len(rows), *queries.shape[1:]), block.places
        out = queries.new_empty(len(rows), queries[:1].numel()) if out is None else out
        merged = out.view(shape)
        if num_later:
            later = slice(1, num_later + 1)
            merge(first, lse, queries, memory.keys[later], memory.values[later], rows, places, scale, merged)
        elif places is None:
            merged.copy_(first)
        else:
            torch.index_select(first, 0, places, out=merged)
        kept = merged.detach() if places is None else first
        ctx.tensors = (queries.detach(), rows, kept, lse)
        ctx.memory, ctx.num_later, ctx.block, ctx.scale = memory, num_later, block, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        queries, rows, out, lse = ctx.tensors
        memory, scale, places = ctx.memory, ctx.scale, ctx.block.places
        grad_out = grad_out.to(queries.dtype).view(len(rows), *queries.shape[1:])
        grad_keys, grad_values = memory.grads
        grad_queries = first_block.backward(
            spread(grad_out, places, len(queries)), queries, memory.keys[0], memory.values[0], out, lse,
            ctx.block, scale, (grad_keys[0], grad_values[0]),
        )  # fmt: skip
        if ctx.num_later:
            later = slice(1, ctx.num_later + 1)
            merge_backward(
                grad_out, queries, memory.keys[later], memory.values[later], rows, places, out, lse, scale,
                grad_queries, grad_keys[later], grad_values[later],
            )  # fmt: skip
        return grad_queries, None, None, None, None, None, None


def spread(tensor: Tensor, places: Tensor | None, size: int) -> Tensor:
    """[N, ...] at `places` of [size, ...], zero between them."""
    if places is None:
        return tensor.contiguous()
    return tensor.new_zeros(size, *tensor.shape[1:]).index_copy_(0, places, tensor)


def merge(
    first: Tensor,
    lse: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    places: Tensor | None,
    scale: float,
    out: Tensor,
) -> None:
    """Add the diagonal terms to a first-block result.

    Args:
        first: [S, h, d], output over the first block; with `places`, gets the merged output too.
        lse: [h, S] fp32, its log-sum-exp; gets the merged one.
        queries: [S, h, d].
        keys, values: [J, R, g, d], later blocks by row of the pack.
        rows: [N], rows of the pack that the queries are.
        places: [N], where they stand among the S; None if they are all.
        scale: factor of the scores.
        out: [N, h, d], gets the merged output.
    """
    if queries.is_cuda:
        from eagle3_core.training.kernels import diagonal

        diagonal.forward(first, lse, queries, keys, values, rows, places, scale, out)
        return
    keys, values = keys.index_select(1, rows).float(), values.index_select(1, rows).float()
    chosen = slice(None) if places is None else places
    grouped = _grouped(queries[chosen], keys.shape[2])
    scores = scale * torch.einsum("ngqd,jngd->ngqj", grouped.float(), keys)
    lse_first = _grouped(lse.T[chosen].unsqueeze(-1), keys.shape[2]).squeeze(-1)
    total = torch.logaddexp(lse_first, torch.logsumexp(scores, dim=-1))
    weights = torch.exp(scores - total.unsqueeze(-1))
    merged = torch.exp(lse_first - total).unsqueeze(-1) * _grouped(first[chosen], keys.shape[2]).float()
    merged = merged + torch.einsum("ngqj,jngd->ngqd", weights, values)
    out.copy_(merged.reshape(out.shape))
    lse[:, chosen] = total.flatten(1).T
    if places is not None:
        first[places] = out.to(first.dtype)


def merge_backward(
    grad_out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    places: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    grad_queries: Tensor,
    grad_keys: Tensor,
    grad_values: Tensor,
) -> None:
    """Add the gradients of the diagonal terms.

    Args:
        grad_out: [N, h, d].
        queries: [S, h, d].
        keys, values: [J, R, g, d].
        rows, places: as in `merge`.
        out: [S, h, d], merged.
        lse: [h, S] fp32, merged.
        scale: factor of the scores.
        grad_queries: [S, h, d], added to.
        grad_keys, grad_values: [J, R, g, d] fp32, added to.
    """
    if queries.is_cuda:
        from eagle3_core.training.kernels import diagonal

        diagonal.backward(
            grad_out, queries, keys, values, rows, places, out, lse, scale, grad_queries, grad_keys,
            grad_values,
        )  # fmt: skip
        return
    keys, values = keys.index_select(1, rows).float(), values.index_select(1, rows).float()
    groups, chosen = keys.shape[2], slice(None) if places is None else places
    grouped, grad = _grouped(queries[chosen], groups).float(), _grouped(grad_out, groups).float()
    scores = scale * torch.einsum("ngqd,jngd->ngqj", grouped, keys)
    weights = torch.exp(scores - _grouped(lse.T[chosen].unsqueeze(-1), groups))
    mean = (grad * _grouped(out[chosen], groups)).sum(-1, keepdim=True)
    grad_scores = scale * weights * (torch.einsum("ngqd,jngd->ngqj", grad, values) - mean)
    found = torch.einsum("ngqj,jngd->ngqd", grad_scores, keys).reshape(grad_out.shape)
    grad_queries[chosen] += found.to(grad_queries.dtype)
    grad_keys.index_add_(1, rows, torch.einsum("ngqj,ngqd->jngd", grad_scores, grouped))
    grad_values.index_add_(1, rows, torch.einsum("ngqj,ngqd->jngd", weights, grad))


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[N, h, d] as [N, g, h/g, d]: the query heads that share a key head side by side."""
    return tensor.reshape(len(tensor), groups, -1, tensor.shape[-1])
