"""The merged attention against one softmax over all keys written out in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3_core.training import attention
from eagle3_core.training.attention import dense_backward, dense_forward, merged_attention
from eagle3_core.training.rows import Run

pytestmark = pytest.mark.engine
ROWS, HEADS, GROUPS, DEPTH = 9, 4, 2, 16
RUNS = (Run(0, 2, 0, 3), Run(2, 5, 3, 9))
"""Queries of rows 1, 2 in a document of three rows and of rows 6, 7, 8 in one of six."""
QUERY_ROWS = [1, 2, 6, 7, 8]


def _tensors(num_later: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_later)
    shapes = [(len(QUERY_ROWS), HEADS, DEPTH), *[(ROWS, GROUPS, DEPTH)] * 2]
    shapes += [(len(QUERY_ROWS), GROUPS, DEPTH)] * (2 * num_later)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _in_full(tensors: list[Tensor], scale: float) -> Tensor:
    queries, keys, values, *later = tensors
    outputs = []
    for number, row in enumerate(QUERY_ROWS):
        start = 0 if row < 3 else 3
        own_keys = torch.cat([keys[start : row + 1], *[k[number : number + 1] for k in later[::2]]])
        own_values = torch.cat([values[start : row + 1], *[v[number : number + 1] for v in later[1::2]]])
        own_keys, own_values = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (own_keys, own_values))
        weights = torch.softmax(scale * torch.einsum("hd,chd->hc", queries[number], own_keys), dim=-1)
        outputs.append(torch.einsum("hc,chd->hd", weights, own_values))
    return torch.stack(outputs)


def _merged(tensors: list[Tensor], scale: float) -> Tensor:
    queries, keys, values, *later = tensors
    pairs = list(zip(later[::2], later[1::2], strict=True))
    return merged_attention(queries, (keys, values), pairs, RUNS, scale)


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
@pytest.mark.parametrize("num_later", [0, 1, 3])
@pytest.mark.parametrize("max_scores", [1 << 22, 7])
def test_equals_one_softmax_over_all_keys(
    kernel: str, num_later: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    if kernel == "dense":
        monkeypatch.setattr(attention, "_forward_kernel", dense_forward)
        monkeypatch.setattr(attention, "_backward_kernel", dense_backward)
    tensors = _tensors(num_later)
    expected, found = _in_full(tensors, 0.3), _merged(tensors, 0.3)
    assert torch.allclose(found, expected, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
    wanted = torch.autograd.grad((expected * weights).sum(), tensors)
    gradients = torch.autograd.grad((found * weights).sum(), tensors)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, other, atol=1e-5)
