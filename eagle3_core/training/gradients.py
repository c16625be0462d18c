"""Sums gradients over ranks while the backward pass still computes others.

Gradients travel in groups. All ranks send the same groups in the same order, as collectives ask for,
whichever of them a rank completes first: a group leaves when it is complete and all before it have left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

LM_HEAD = "lm_head.weight"
GROUP_ELEMENTS = 1 << 24
"""Small gradients are sent together, up to so many numbers (64 MiB)."""
Group = list[str]
Wait = Callable[[], object]


def sending_order(parameters: Mapping[str, Parameter]) -> list[str]:
    """Names in about the order in which a backward pass completes the gradients.

    The LM head comes first, whose gradient the loss has made; then what else stands outside the decoder
    layers, and layers from the last to the first, each from its end. Vectors are small enough to go last, all
    together.

    Args:
        parameters: by name, in the order of the draft's modules.
    """
    places = {name: place for place, name in enumerate(parameters)}

    def turn(name: str) -> tuple[bool, bool, bool, int]:
        is_vector, in_layer = parameters[name].ndim == 1, name.startswith("layers.")
        return is_vector, name != LM_HEAD, in_layer, -places[name]

    return sorted(parameters, key=turn)


def grouped(parameters: Mapping[str, Parameter], limit: int = GROUP_ELEMENTS) -> list[Group]:
    """Names in order, together while their tensors have at most `limit` numbers; a larger one stands alone.

    Of 3, 4, 20 and 5 numbers and a limit of 8: [3, 4], [20], [5].
    """
    groups: list[Group] = []
    filled = limit
    for name, parameter in parameters.items():
        if filled + parameter.numel() > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += parameter.numel()
    return groups


class GradientSender:
    """Sends groups of gradients, in the backward pass or after it.

    Args:
        parameters: by name, with gradients or about to get them.
        groups: of names, in the order in which they are sent.
        send: begins to send a group, whose gradients lie in `parameters`; what it returns waits for the sums.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        groups: Sequence[Group],
        send: Callable[[Group], Wait],
    ) -> None:
        self._parameters, self._groups, self._send = parameters, groups, send
        self._sent: list[Wait] = []

    @contextlib.contextmanager
    def early(self) -> Iterator[None]:
        """Around the last backward pass of a step: groups leave as soon as their turn has come."""
        missing = [len(group) for group in self._groups]

        def complete(number: int, _: Tensor) -> None:
            missing[number] -= 1
            while len(self._sent) < len(missing) and not missing[len(self._sent)]:
                self._send_next()

        hooks = [
            self._parameters[name].register_post_accumulate_grad_hook(partial(complete, number))
            for number, group in enumerate(self._groups)
            for name in group
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> None:
        """Send what has not left yet, zeros for what has no gradient, and wait for all sums."""
        while len(self._sent) < len(self._groups):
            self._send_next()
        for wait in self._sent:
            wait()
        self._sent = []

    def _send_next(self) -> None:
        group = self._groups[len(self._sent)]
        for name in group:
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._sent.append(self._send(group))


def begin_sum(tensors: Sequence[Tensor]) -> Wait:
    """Begin to sum each tensor over all ranks in place, by one call; the result waits for the sums."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return dist.all_reduce(tensors[0], async_op=True).wait  # type: ignore[no-any-return, union-attr]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    work = dist.all_reduce(flat, async_op=True)

    def wait() -> None:
        work.wait()
        parts = flat.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(
            list(tensors), [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        )

    return wait
