"""Merge of the first block's attention with one key of each later block, and its gradient.

Legend: N query rows, R rows of the pack, J later blocks, h query heads, g key/value heads, d head size.

One program takes one row with all its heads as a tile [g, h/g, d], so keys and values are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_A_WARP = 512


def forward(
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
    """Twin of `attention.merge`."""
    heads, depth = queries.shape[1:]
    groups = keys.shape[2]
    if len(rows):
        assert all(x.is_contiguous() for x in (first, lse, queries, out))
        _forward[(len(rows),)](
            first, lse, queries, keys, values, keys.stride(0), keys.stride(1), rows,
            rows if places is None else places, out, len(queries), len(keys), scale, groups, depth,
            HAS_PLACES=places is not None, **_tile(heads, groups, depth),
        )  # fmt: skip


def backward(
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
    """Twin of `attention.merge_backward`."""
    heads, depth = queries.shape[1:]
    groups = keys.shape[2]
    if len(rows):
        assert all(x.is_contiguous() for x in (queries, out, lse, grad_queries))
        _backward[(len(rows),)](
            grad_out.contiguous(), queries, keys, values, keys.stride(0), keys.stride(1), rows,
            rows if places is None else places, out, lse, grad_queries, grad_keys, grad_values,
            len(queries), len(keys), scale, groups, depth,
            HAS_PLACES=places is not None, **_tile(heads, groups, depth),
        )  # fmt: skip


def _tile(heads: int, groups: int, depth: int) -> dict[str, int]:
    share = heads // groups
    sizes = [triton.next_power_of_2(size) for size in (groups, share, depth)]
    warps = min(16, max(1, sizes[0] * sizes[1] * sizes[2] // ELEMENTS_A_WARP))
    return {"SHARE": share, "G": sizes[0], "Q": sizes[1], "D": sizes[2], "num_warps": warps}


@triton.jit(do_not_specialize=["count", "num_later"], do_not_specialize_on_alignment=["rows", "places"])
def _forward(
    first, lse, queries, keys, values, block_stride, row_stride, rows, places, out, count, num_later, scale,
    groups, depth, HAS_PLACES: tl.constexpr,
    SHARE: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query_row = row
    if HAS_PLACES:
        query_row = tl.load(places + row).to(tl.int64)
    group = tl.arange(0, G)[:, None, None]
    share = tl.arange(0, Q)[None, :, None]
    col = tl.arange(0, D)[None, None, :]
    inside = (group < groups) & (share < SHARE) & (col < depth)
    in_keys = (group < groups) & (col < depth)
    inner = (group * SHARE + share) * depth + col
    at = query_row * groups * SHARE * depth + inner
    query = tl.load(queries + at, mask=inside, other=0.0).to(tl.float32) * scale
    total = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    head = tl.arange(0, G)[:, None] * SHARE + tl.arange(0, Q)[None, :]
    in_heads = (tl.arange(0, G)[:, None] < groups) & (tl.arange(0, Q)[None, :] < SHARE)
    highest = tl.load(lse + head.to(tl.int64) * count + query_row, mask=in_heads, other=0.0)
    weight = tl.full([G, Q], 1.0, dtype=tl.float32)
    place = tl.load(rows + row).to(tl.int64) * row_stride + group * depth + col
    for _ in range(num_later):
        key = tl.load(keys + place, mask=in_keys, other=0.0)
        score = tl.sum(query * key.to(tl.float32), axis=2)
        top = tl.maximum(highest, score)
        old, new = tl.exp(highest - top), tl.exp(score - top)
        value = tl.load(values + place, mask=in_keys, other=0.0)
        total = total * old[:, :, None] + new[:, :, None] * value.to(tl.float32)
        weight = weight * old + new
        highest = top
        place += block_stride
    total = total / weight[:, :, None]
    tl.store(out + row * groups * SHARE * depth + inner, total.to(out.dtype.element_ty), mask=inside)
    if HAS_PLACES:
        tl.store(first + at, total.to(first.dtype.element_ty), mask=inside)
    tl.store(lse + head.to(tl.int64) * count + query_row, highest + tl.log(weight), mask=in_heads)


@triton.jit(do_not_specialize=["count", "num_later"], do_not_specialize_on_alignment=["rows", "places"])
def _backward(
    grad_out, queries, keys, values, block_stride, row_stride, rows, places, out, lse, grad_queries,
    grad_keys, grad_values, count, num_later, scale, groups, depth, HAS_PLACES: tl.constexpr,
    SHARE: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query_row = row
    if HAS_PLACES:
        query_row = tl.load(places + row).to(tl.int64)
    group = tl.arange(0, G)[:, None, None]
    share = tl.arange(0, Q)[None, :, None]
    col = tl.arange(0, D)[None, None, :]
    inside = (group < groups) & (share < SHARE) & (col < depth)
    in_keys = (group < groups) & (col < depth)
    inner = (group * SHARE + share) * depth + col
    at = query_row * groups * SHARE * depth + inner
    query = tl.load(queries + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + row * groups * SHARE * depth + inner, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(grad * tl.load(out + at, mask=inside, other=0.0).to(tl.float32), axis=2)
    head = tl.arange(0, G)[:, None] * SHARE + tl.arange(0, Q)[None, :]
    in_heads = (tl.arange(0, G)[:, None] < groups) & (tl.arange(0, Q)[None, :] < SHARE)
    total = tl.load(lse + head.to(tl.int64) * count + query_row, mask=in_heads, other=0.0)
    grad_query = tl.load(grad_queries + at, mask=inside, other=0.0).to(tl.float32)
    place = tl.load(rows + row).to(tl.int64) * row_stride + group * depth + col
    for _ in range(num_later):
        key = tl.load(keys + place, mask=in_keys, other=0.0).to(tl.float32)
        value = tl.load(values + place, mask=in_keys, other=0.0).to(tl.float32)
        weight = tl.where(in_heads, tl.exp(scale * tl.sum(query * key, axis=2) - total), 0.0)
        grad_score = scale * weight * (tl.sum(grad * value, axis=2) - mean)
        grad_query += grad_score[:, :, None] * key
        grad_key = tl.sum(grad_score[:, :, None] * query, axis=1)[:, None, :]
        grad_value = tl.sum(weight[:, :, None] * grad, axis=1)[:, None, :]
        grad_key += tl.load(grad_keys + place, mask=in_keys, other=0.0)
        grad_value += tl.load(grad_values + place, mask=in_keys, other=0.0)
        tl.store(grad_keys + place, grad_key, mask=in_keys)
        tl.store(grad_values + place, grad_value, mask=in_keys)
        place += block_stride
    tl.store(grad_queries + at, grad_query.to(grad_queries.dtype.element_ty), mask=inside)
