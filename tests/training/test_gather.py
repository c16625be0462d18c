"""A state that several ranks hold in parts is saved whole, and read by another number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import TrainingError
from eagle3_core.sections import TrainConfig
from eagle3_core.training.gather import gather, part_for, parts_of_state, restore_parameters
from eagle3_core.training.optimizers import Optimizers

pytestmark = pytest.mark.engine
SHAPES = {"layers.0.weight": (6, 4), "norm.weight": (4,)}


def parameters(fill: float | None = None) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if fill is not None:
        made = {name: torch.full_like(tensor, fill) for name, tensor in made.items()}
    return {name: torch.nn.Parameter(tensor) for name, tensor in made.items()}


def take_steps(named: dict[str, torch.nn.Parameter], optimizers: Optimizers, numbers: range) -> None:
    """Steps with gradients that follow from the step's number alone."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for name, parameter in named.items():
            gradient = torch.randn(SHAPES[name], generator=generator)
            parameter.grad = part_for(parameter, gradient)
        optimizers.step(0.01)


def train_config(optimizer: str) -> TrainConfig:
    return TrainConfig(optimizer=optimizer, weight_decay=0.1)  # type: ignore[arg-type]


RANK = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tests.training.test_gather import parameters, take_steps, train_config
from eagle3_core.training.gather import gather, parts_of_state, restore_parameters
from eagle3_core.training.optimizers import Optimizers
folder, optimizer = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
named = {
    name: torch.nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    for name, whole in parameters(0.0).items()
}
optimizers = Optimizers(named, train_config(optimizer))
state = torch.load(f"{folder}/before.pt", weights_only=True, mmap=True)
restore_parameters(named, state["parameters"])
optimizers.load_state(parts_of_state(named, state["optimizer"]))
assert all(len(p.to_local()) < len(p) for p in named.values())
take_steps(named, optimizers, range(3, 6))
after = gather({"parameters": named, "optimizer": optimizers.state()})
if dist.get_rank() == 0:
    torch.save(after, f"{folder}/after.pt")
dist.barrier()
dist.destroy_process_group()
"""


def _run_ranks(folder: Path, optimizer: str, ranks: int) -> None:
    environment = os.environ | {
        "PYTHONPATH": str(PROJECT_ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), optimizer],
            cwd=PROJECT_ROOT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-3000:]


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_process_saves_two_ranks_go_on_and_one_process_takes_over(tmp_path: Path, optimizer: str) -> None:
    straight = parameters()
    never_stopped = Optimizers(straight, train_config(optimizer))
    take_steps(straight, never_stopped, range(9))

    named = parameters()
    optimizers = Optimizers(named, train_config(optimizer))
    take_steps(named, optimizers, range(3))
    torch.save(gather({"parameters": named, "optimizer": optimizers.state()}), tmp_path / "before.pt")
    _run_ranks(tmp_path, optimizer, ranks=2)

    after = torch.load(tmp_path / "after.pt", weights_only=True)
    named = parameters(0.0)
    optimizers = Optimizers(named, train_config(optimizer))
    restore_parameters(named, after["parameters"])
    optimizers.load_state(parts_of_state(named, after["optimizer"]))
    take_steps(named, optimizers, range(6, 9))
    # Muon makes its matrices orthogonal in bf16, whose rounding depends on how they are sharded.
    within = 5e-3 if optimizer == "muon" else 1e-6
    for name, parameter in straight.items():
        torch.testing.assert_close(named[name], parameter, rtol=within, atol=within)
    torch.testing.assert_close(optimizers.state(), never_stopped.state(), rtol=1e-6, atol=1e-7)


def test_what_is_restored_outlives_the_file_and_the_saved_tensors() -> None:
    named = parameters()
    optimizers = Optimizers(named, train_config("adamw"))
    take_steps(named, optimizers, range(2))
    saved = gather({"parameters": named, "optimizer": optimizers.state()})
    saved = torch.utils._pytree.tree_map(lambda tensor: tensor.clone(), saved)
    other = parameters(0.0)
    again = Optimizers(other, train_config("adamw"))
    restore_parameters(other, saved["parameters"])
    again.load_state(parts_of_state(other, saved["optimizer"]))
    for tensor in torch.utils._pytree.tree_leaves(saved):
        tensor.fill_(7.0)
    take_steps(named, optimizers, range(2, 4))
    take_steps(other, again, range(2, 4))
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_weights_of_another_shape_or_name_are_refused_with_both() -> None:
    saved = {name: tensor.detach() for name, tensor in parameters().items()}
    saved["norm.weight"] = torch.zeros(5)
    with pytest.raises(TrainingError, match=r"norm.weight of shape \(5,\); expected norm.weight of shape"):
        restore_parameters(parameters(), saved)
    del saved["norm.weight"]
    with pytest.raises(TrainingError, match=r"the checkpoint has no norm.weight; expected norm.weight of"):
        restore_parameters(parameters(), saved)
