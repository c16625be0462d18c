"""Weights on several ranks: whole on each, or sharded by FSDP2.

The unrolled forward reads a draft's weights without calling its modules, so nothing here relies on hooks of
a module's forward: sharded weights are put together before the packs of a step and given up after them.
Gradients are summed once a step, in the backward pass of the last pack: matrices get theirs one after the
other at its end (see `matrices`), and each is sent while the next is computed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
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
from eagle3_core.training.gradients import (
    GradientSender,
    Group,
    Wait,
    begin_sum,
    grouped,
    sending_order,
)
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

    def sending(self) -> contextlib.AbstractContextManager[None]:
        """Around the last backward pass of a step, within `whole`: gradients leave as they are completed."""

    def reduce(self) -> None:
        """Sum all gradients over all ranks into those of `parameters`; called within `whole`."""

    def clip(self, max_norm: float) -> float:
        """Clip the gradients of `parameters`; returns their norm over all ranks before that."""


class WholeWeights:
    """Every rank has all weights and steps them alike."""

    def __init__(self, draft: Any, ranks: Ranks) -> None:
        self.parameters = trained_parameters(draft)
        ordered = {name: self.parameters[name] for name in sending_order(self.parameters)}
        groups = grouped(ordered) if ranks.size > 1 else []
        self._sender = GradientSender(self.parameters, groups, self._send)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Nothing to do."""
        yield

    def sending(self) -> contextlib.AbstractContextManager[None]:
        """Send gradients as they are completed."""
        return self._sender.early()

    def reduce(self) -> None:
        """Sum gradients over all ranks."""
        self._sender.finish()

    def clip(self, max_norm: float) -> float:
        """Clip; see `Weights`."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm))

    def _send(self, group: Group) -> Wait:
        return begin_sum([self.parameters[name].grad for name in group])  # type: ignore[misc]


class ShardedWeights:
    """Every rank has a part of each weight, by rows, and steps that; frozen weights stay whole."""

    def __init__(self, draft: Any, ranks: Ranks, device: torch.device) -> None:
        frozen = {parameter for parameter in draft.parameters() if not parameter.requires_grad}
        mesh = init_device_mesh(device.type, (ranks.size,))
        fully_shard(draft, mesh=mesh, ignored_params=frozen)
        self._draft, self._size = draft, ranks.size
        self.parameters = trained_parameters(draft)
        self._sender: GradientSender | None = None

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Put weights together, and give the other ranks' parts up at the end."""
        self._draft.unshard()
        parameters = trained_parameters(self._draft)
        groups = [[name] for name in sending_order(parameters)]
        self._sender = GradientSender(parameters, groups, partial(self._send, parameters))
        try:
            yield
        finally:
            self._sender = None
            for parameter in parameters.values():
                parameter.grad = None
            self._draft.reshard()

    def sending(self) -> contextlib.AbstractContextManager[None]:
        """Send gradients as they are completed."""
        assert self._sender is not None
        return self._sender.early()

    def reduce(self) -> None:
        """Sum gradients over all ranks; each keeps its rows."""
        assert self._sender is not None
        self._sender.finish()

    def clip(self, max_norm: float) -> float:
        """Clip; see `Weights`."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _send(self, whole: Mapping[str, Parameter], group: Group) -> Wait:
        """Begin to sum a gradient over all ranks; this one keeps its rows."""
        (name,) = group
        gradient = whole[name].grad
        assert gradient is not None
        most = -(-len(gradient) // self._size)
        missing = most * self._size - len(gradient)
        padded = gradient.contiguous()
        if missing:
            padded = torch.cat([padded, padded.new_zeros(missing, *gradient.shape[1:])])
        whole[name].grad = None  # what is sent may be a copy, which the work keeps
        own = padded.new_empty(most, *gradient.shape[1:])
        work = REDUCE_SCATTER(own, padded, async_op=True)

        def wait() -> None:
            work.wait()
            self._keep(name, own)

        return wait

    def _keep(self, name: str, rows: Tensor) -> None:
        """Make a summed gradient's rows, padding included, that of the sharded parameter."""
        sharded = self.parameters[name]
        assert isinstance(sharded, DTensor)
        sharded.grad = DTensor.from_local(
            rows[: len(sharded.to_local())].contiguous(),
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )


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
