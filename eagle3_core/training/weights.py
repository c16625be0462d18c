"""Weights on several ranks: whole on each, or sharded by FSDP2.

The unrolled forward reads a draft's weights without calling its modules, so nothing here relies on hooks of
a module's forward: sharded weights are put together before the packs of a step and given up after them, and
gradients are summed when the last pack is done. Every weight's gradient is complete only then, at the end of
the backward pass (see `matrices`), so there is little that could have been sent earlier.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from eagle3_core.sections import TrainConfig
from eagle3_core.training.draft import trained_parameters
from eagle3_core.training.ranks import Ranks

logger = logging.getLogger(__name__)
Mode = Literal["ddp", "fsdp2"]
BYTES_PER_PARAMETER = 16
"""fp32 weight, gradient and two moments."""
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Its name has changed in torch 2.13."""
LARGE_SHARE = 0.4
"""Of a GPU's memory: `auto` shards weights and state that would take more."""


class Weights(Protocol):
    """The trained weights of a draft, however they are held.

    Attributes:
        parameters: by name, as the optimizer steps them.
    """

    parameters: dict[str, Parameter]

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Within it the draft's modules have whole weights."""

    def reduce(self) -> None:
        """Sum gradients over all ranks into those of `parameters`; called within `whole`."""

    def clip(self, max_norm: float) -> float:
        """Clip the gradients of `parameters`; returns their norm over all ranks before that."""


class WholeWeights:
    """Every rank has all weights and steps them alike."""

    def __init__(self, draft: Any, ranks: Ranks) -> None:
        self.parameters = trained_parameters(draft)
        self._ranks = ranks

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Nothing to do."""
        yield

    def reduce(self) -> None:
        """Sum gradients over all ranks."""
        self._ranks.sum_gradients(self.parameters)

    def clip(self, max_norm: float) -> float:
        """Clip; see `Weights`."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm))


class ShardedWeights:
    """Every rank has a part of each weight, by rows, and steps that; frozen weights stay whole."""

    def __init__(self, draft: Any, ranks: Ranks, device: torch.device) -> None:
        frozen = {parameter for parameter in draft.parameters() if not parameter.requires_grad}
        mesh = init_device_mesh(device.type, (ranks.size,))
        fully_shard(draft, mesh=mesh, ignored_params=frozen)
        self._draft, self._size, self._rank = draft, ranks.size, ranks.rank
        self.parameters = trained_parameters(draft)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Put weights together, and give the other ranks' parts up at the end."""
        self._draft.unshard()
        try:
            yield
        finally:
            for parameter in trained_parameters(self._draft).values():
                parameter.grad = None
            self._draft.reshard()

    def reduce(self) -> None:
        """Sum gradients over all ranks; each keeps its rows."""
        for name, whole in trained_parameters(self._draft).items():
            sharded = self.parameters[name]
            assert isinstance(sharded, DTensor)
            gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
            whole.grad = None
            sharded.grad = DTensor.from_local(
                self._own_rows(gradient, len(sharded.to_local())),
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )

    def clip(self, max_norm: float) -> float:
        """Clip; see `Weights`."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _own_rows(self, gradient: Tensor, num_rows: int) -> Tensor:
        """This rank's rows of a gradient summed over all ranks."""
        most = -(-len(gradient) // self._size)
        missing = most * self._size - len(gradient)
        padded = gradient.contiguous()
        if missing:
            padded = torch.cat([padded, padded.new_zeros(missing, *gradient.shape[1:])])
        own = padded.new_empty(most, *gradient.shape[1:])
        REDUCE_SCATTER(own, padded)
        return own[:num_rows].contiguous()


def hold_weights(draft: Any, ranks: Ranks, mode: Mode, device: torch.device) -> Weights:
    """The draft's trained weights on all ranks, equal to the first one's.

    Args:
        draft: on its device, the same on all ranks.
        ranks: that share training.
        mode: from `choose_mode`.
        device: of this rank.
    """
    ranks.spread([parameter.data for parameter in trained_parameters(draft).values()])
    if ranks.size == 1 or mode == "ddp":
        return WholeWeights(draft, ranks)
    return ShardedWeights(draft, ranks, device)


def choose_mode(train: TrainConfig, num_parameters: int, memory_bytes: int | None) -> Mode:
    """How weights are held where there are several ranks.

    Args:
        train: what the configuration wants.
        num_parameters: trained ones.
        memory_bytes: of one GPU; None on the CPU.
    """
    if train.parallel != "auto":
        return train.parallel
    if memory_bytes is None or train.optimizer == "muon":
        return "ddp"
    return "fsdp2" if num_parameters * BYTES_PER_PARAMETER > LARGE_SHARE * memory_bytes else "ddp"
