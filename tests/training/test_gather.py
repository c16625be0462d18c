"""Whole states by name: copied when they are restored, refused where they do not fit."""

from __future__ import annotations

import pytest
import torch

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
