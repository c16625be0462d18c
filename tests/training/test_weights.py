"""Gradients of ranks that compute different amounts are summed once each, whole or by rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.training.runs import run_ranks

pytestmark = pytest.mark.engine
NUM_RANKS = 3
RANK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from tests.training.test_weights import gradients_of
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
found = {mode: gradients_of(mode, rank) for mode in ("ddp", "fsdp2")}
torch.save(found, folder / f"{rank}.pt")
"""


class Few(torch.nn.Module):
    """Rows that three ranks cannot share evenly; two of its weights have gradients on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.idle = torch.nn.Parameter(torch.randn(5, 2))
        self.wide = torch.nn.Parameter(torch.randn(7, 3))
        self.low = torch.nn.Parameter(torch.randn(2, 3))
        self.vector = torch.nn.Parameter(torch.randn(4))


def losses_of(model: Few, rank: int) -> list[Tensor]:
    """One a pack: none on the last rank, two on the second, the last of which leaves out a weight."""
    first = (model.wide.square().sum() + 3 * model.wide.sum() + model.low.sum()) * (rank + 1)
    return [[first + model.vector.sum()], [first, model.wide.sum() * model.vector.sum()], []][rank]


def gradients_of(mode: str, rank: int) -> dict[str, Tensor]:
    """Of one step, after all ranks have summed them and before they are clipped, whole."""
    from eagle3_core.training.gather import gather
    from eagle3_core.training.ranks import Ranks
    from eagle3_core.training.weights import hold_weights

    model = Few()
    weights = hold_weights(model, Ranks(rank, NUM_RANKS), mode, torch.device("cpu"))  # type: ignore[arg-type]
    with weights.whole():
        losses = losses_of(model, rank)
        for loss in losses[:-1]:
            loss.backward(retain_graph=True)
        for loss in losses[-1:]:
            with weights.sending():
                loss.backward()
        if mode == "fsdp2" and rank == 0:  # what has left is not kept beside what is sent of it
            assert {name for name, each in model.named_parameters() if each.grad is None} == {
                "idle",
                "low",
                "wide",
            }
        weights.reduce()
    return {name: gather(each.grad) for name, each in weights.parameters.items()}


def test_three_ranks_sum_each_gradient_once_also_where_some_have_none(tmp_path: Path) -> None:
    model = Few()
    torch.stack([loss for rank in range(NUM_RANKS) for loss in losses_of(model, rank)]).sum().backward()
    run_ranks(RANK, [str(tmp_path)], NUM_RANKS)
    for rank in range(NUM_RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        for mode in ("ddp", "fsdp2"):
            assert not found[mode].pop("idle").any()
            for name, gradient in found[mode].items():
                torch.testing.assert_close(gradient, getattr(model, name).grad, msg=f"{mode} {name}")
