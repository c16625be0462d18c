"""Weights and optimizer state by parameter name and whole, whatever number of ranks holds them.

A checkpoint knows nothing of ranks: sharded tensors are put together when it is made, and each rank takes its
part when it is read. So a run can go on with another number of ranks, or with none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from eagle3_core.errors import TrainingError
from eagle3_core.training.optimizers import State

STEP_COUNT = "step"
"""An optimizer's count of steps: a tensor that is never sharded."""


def gather(values: Any) -> Any:
    """Nested dictionaries of tensors with every sharded tensor whole.

    All ranks must call it at the same point. Tensors that are not sharded come back as they are, not copied.
    """
    if isinstance(values, dict):
        return {key: gather(value) for key, value in values.items()}
    return whole(values) if isinstance(values, Tensor) else values


def whole(tensor: Tensor) -> Tensor:
    """One tensor, whole if it is sharded; all ranks must ask for it at the same point."""
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def take_part(values: Any) -> None:
    """Send this rank's parts of nested dictionaries to the rank that takes a copy of them, which asks for one
    tensor after the other.
    """
    if isinstance(values, dict):
        for value in values.values():
            take_part(value)
    elif isinstance(values, Tensor):
        whole(values)


def restore_parameters(parameters: Mapping[str, Parameter], saved: Mapping[str, Tensor]) -> None:
    """Copy whole weights into parameters that may be sharded.

    Raises:
        TrainingError: a name or a shape differs; names both.
    """
    check_shapes(parameters, saved)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(part_for(parameter, saved[name]))


def parts_of_state(parameters: Mapping[str, Parameter], saved: Mapping[str, Mapping[str, Any]]) -> State:
    """Whole optimizer state as each rank needs it: copies on the parameters' devices, sharded as they are."""
    return {
        name: {
            key: value.clone() if key == STEP_COUNT else part_for(parameters[name], value)
            for key, value in entry.items()
        }
        if name in parameters
        else dict(entry)
        for name, entry in saved.items()
    }


def check_shapes(parameters: Mapping[str, Parameter], saved: Mapping[str, Tensor]) -> None:
    """Refuse weights of other names or shapes.

    Raises:
        TrainingError: names the first that differs, with both shapes.
    """
    ours = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise TrainingError(
                f"the checkpoint has {_described(name, theirs.get(name))}",
                expected=_described(name, ours.get(name)),
                remedy="remove the checkpoint's folder to train from the start",
            )


def part_for(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A copy of a whole tensor on the device of `parameter`, of which each rank keeps its part if that is
    sharded.
    """
    if isinstance(parameter, DTensor):
        local = tensor.to(parameter.device)
        return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor.to(parameter.device, copy=True)


def _described(name: str, shape: tuple[int, ...] | None) -> str:
    return f"no {name}" if shape is None else f"{name} of shape {shape}"
