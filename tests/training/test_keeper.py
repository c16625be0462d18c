"""A training on one process, on two ranks that shard it, and on one again is one that never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.contracts import AcceptanceFigures, EpochMetrics
from eagle3_core.errors import TrainingError
from eagle3_core.sections import TrainConfig
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.keeper import Keeper
from eagle3_core.training.metrics_log import MetricsLog
from eagle3_core.training.optimizers import Optimizers
from tests.training.runs import run_ranks
from tests.training.test_gather import parameters, take_steps, train_config

pytestmark = pytest.mark.engine
PLAN = ArtifactPlan(kind="checkpoint", identity={"for": "a test"})
RANK = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tests.training.test_gather import parameters, train_config
from tests.training.test_keeper import go_on
folder, optimizer = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=int(sys.argv[3]), world_size=int(sys.argv[4])
)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
named = {
    name: torch.nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    for name, whole in parameters(0.0).items()
}
def agree(answer):
    given = [answer]
    dist.broadcast_object_list(given)
    return given[0]
assert all(len(p.to_local()) < len(p) for p in named.values())
go_on(folder, named, train_config(optimizer), 3, agree, is_first=dist.get_rank() == 0)
"""


def look(step: int) -> tuple[EpochMetrics, AcceptanceFigures]:
    """A look that is better than those before it."""
    figures = AcceptanceFigures(
        num_speculative_tokens=1,
        acceptance_length=1 + step / 100,
        per_position=[step / 100],
        conditional=[None],
        num_passes=10,
        num_samples=2,
    )
    metrics = EpochMetrics(
        epoch=0, step=step, train_loss=2, heldout_loss=2, heldout=figures, learning_rate=1, seconds=1
    )
    return metrics, figures


def go_on(
    folder: Path,
    named: dict[str, torch.nn.Parameter],
    train: TrainConfig,
    steps: int,
    agree: Any = bool,
    is_first: bool = True,
) -> tuple[Optimizers, Keeper]:
    """Restore, take some steps, look and save."""
    optimizers = Optimizers(named, train)
    metrics = MetricsLog(folder) if is_first else None
    keeper = Keeper(named, optimizers, ResumeFolder(folder, PLAN), metrics, train, 9, agree)
    with keeper:
        position = keeper.restore()
        done = position["step"] if position else 0
        for step in range(done, done + steps):
            take_steps(named, optimizers, range(step, step + 1))
            keeper.history.recent.add(float(step), 1.0, window=16)
            if metrics is not None:
                metrics.append([{"type": "step", "step": step + 1}])
            keeper.save_if_due(step + 1, lambda: {"step": step + 1})  # noqa: B023
        metrics_and_figures = look(done + steps)
        keeper.remember(*metrics_and_figures, lambda: {"step": done + steps})
    return optimizers, keeper


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_process_two_ranks_and_one_process_are_one_training(tmp_path: Path, optimizer: str) -> None:
    train = train_config(optimizer)
    straight = parameters()
    never_stopped = Optimizers(straight, train)
    take_steps(straight, never_stopped, range(9))

    go_on(tmp_path, parameters(), train, 3)
    run_ranks(RANK, [str(tmp_path), optimizer], 2)
    named = parameters(0.0)
    optimizers, keeper = go_on(tmp_path, named, train, 3)
    # Muon makes its matrices orthogonal in bf16, whose rounding depends on how they are sharded.
    within = 5e-3 if optimizer == "muon" else 1e-6
    for name, parameter in straight.items():
        torch.testing.assert_close(named[name], parameter, rtol=within, atol=within)
    torch.testing.assert_close(optimizers.state(), never_stopped.state(), rtol=1e-6, atol=1e-7)
    assert [each.step for each in keeper.history.looks] == [3, 6, 9]
    assert keeper.history.recent.losses == [float(step) for step in range(9)]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 10))
    for parameter in named.values():
        parameter.detach().zero_()
    keeper.load_best()
    torch.testing.assert_close(named["norm.weight"], straight["norm.weight"], rtol=within, atol=within)


def test_a_checkpoint_of_a_training_of_another_length_is_refused_with_both(tmp_path: Path) -> None:
    """The learning rate of a step depends on how many there are."""
    train = train_config("adamw")
    go_on(tmp_path, parameters(), train, 3)
    named = parameters()
    folder, metrics = ResumeFolder(tmp_path, PLAN), MetricsLog(tmp_path)
    keeper = Keeper(named, Optimizers(named, train), folder, metrics, train, num_steps=12)
    with pytest.raises(TrainingError, match="a training of 9 steps; expected 12 steps"):
        keeper.restore()
