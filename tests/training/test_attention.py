"""The merged attention against one softmax over all keys written out in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle3_core.training import first_block
from eagle3_core.training.attention import merged_attention
from eagle3_core.training.first_block import FirstBlock, dense_backward, dense_forward
from eagle3_core.training.heads import BlockMemory
from eagle3_core.training.rows import Run

pytestmark = pytest.mark.engine
ROWS, HEADS, GROUPS, DEPTH = 9, 4, 2, 16
RUNS = (Run(0, 2, 0, 3), Run(2, 5, 3, 9))
"""Queries of rows 1, 2 in a document of three rows and of rows 6, 7, 8 in one of six."""
QUERY_ROWS = [1, 2, 6, 7, 8]


def _tensors(num_later: int) -> list[Tensor]:
    """Queries, and keys and values of all blocks by row of the pack, [J + 1, R, g, d]."""
    generator = torch.Generator().manual_seed(num_later)
    shapes = [(len(QUERY_ROWS), HEADS, DEPTH), *[(num_later + 1, ROWS, GROUPS, DEPTH)] * 2]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def _in_full(tensors: list[Tensor], scale: float, window: int | None) -> Tensor:
    queries, keys, values = tensors
    outputs = []
    for number, row in enumerate(QUERY_ROWS):
        start = max(0 if row < 3 else 3, 0 if window is None else row - window + 1)
        own_keys = torch.cat([keys[0, start : row + 1], keys[1:, row]])
        own_values = torch.cat([values[0, start : row + 1], values[1:, row]])
        own_keys, own_values = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (own_keys, own_values))
        weights = torch.softmax(scale * torch.einsum("hd,chd->hc", queries[number], own_keys), dim=-1)
        outputs.append(torch.einsum("hc,chd->hd", weights, own_values))
    return torch.stack(outputs)


@pytest.mark.parametrize("kernel", ["cpu", "dense"])
@pytest.mark.parametrize("num_later", [0, 1, 3])
@pytest.mark.parametrize(("max_scores", "window"), [(1 << 22, None), (7, None), (7, 2)])
def test_equals_one_softmax_over_all_keys(
    kernel: str, num_later: int, max_scores: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_block, "MAX_SCORES", max_scores)
    if kernel == "dense":
        monkeypatch.setattr(first_block, "_forward_kernel", dense_forward)
        monkeypatch.setattr(first_block, "_backward_kernel", dense_backward)
    queries, keys, values = tensors = _tensors(num_later)
    expected = _in_full(tensors, 0.3, window)
    memory = BlockMemory(num_later + 1, ROWS, GROUPS, DEPTH, torch.float32, torch.device("cpu"))
    memory.keys.copy_(keys.detach())
    memory.values.copy_(values.detach())
    rows = torch.tensor(QUERY_ROWS)
    found = merged_attention(queries, memory, rows, num_later, FirstBlock(RUNS, window=window), 0.3)
    found = found.view(expected.shape)
    assert torch.allclose(found, expected, atol=1e-6)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(7))
    wanted = torch.autograd.grad((expected * weights).sum(), tensors)
    gradients = [*torch.autograd.grad((found * weights).sum(), queries), *memory.grads]
    for gradient, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, other, atol=1e-5)
