"""AdamW, or Muon for the layers' matrices beside AdamW for the rest, as one optimizer with state by name.

Muon steps along the orthogonalised momentum of a matrix (Jordan et al. 2024,
kellerjordan.github.io/posts/muon). Scaled by 0.2 sqrt(max(rows, columns)) its update has the size of AdamW's,
so learning rate and weight decay are shared (Liu et al. 2025, arXiv 2502.16982). Embeddings, output heads and
vectors stay with AdamW. Weight decay acts on matrices only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from eagle3_core.errors import TrainingError
from eagle3_core.sections import TrainConfig

HEADS = ("embed_tokens.weight", "lm_head.weight")
"""Matrices that Muon leaves to AdamW."""
State = dict[str, dict[str, Tensor]]
"""What an optimizer remembers of each parameter, by the parameter's name."""
REMEMBERED = {torch.optim.Muon: {"momentum_buffer"}, torch.optim.AdamW: {"exp_avg", "exp_avg_sq", "step"}}


def muon_names(parameters: Mapping[str, Parameter]) -> list[str]:
    """The parameters that Muon is for: matrices, heads apart, that are more than one row or column."""
    return [
        name
        for name, parameter in parameters.items()
        if parameter.ndim == 2 and min(parameter.shape) > 1 and name not in HEADS
    ]


class Optimizers:
    """Steps all trained parameters.

    Args:
        parameters: by name, fp32, as they will be stepped: after any sharding.
        train: optimizer, rates, betas, momentum and weight decay.

    Attributes:
        parts: the torch optimizers, e.g. for torch's distributed checkpoints.
    """

    def __init__(self, parameters: Mapping[str, Parameter], train: TrainConfig) -> None:
        self._parameters = dict(parameters)
        by_muon = set(muon_names(parameters)) if train.optimizer == "muon" else set()
        rest = {name: parameter for name, parameter in parameters.items() if name not in by_muon}
        self.parts: list[torch.optim.Optimizer] = []
        if by_muon:
            rate = train.muon_learning_rate or train.learning_rate
            group = [parameter for name, parameter in parameters.items() if name in by_muon]
            self.parts.append(
                torch.optim.Muon(
                    [{"params": group, "peak_ratio": rate / train.learning_rate}],
                    lr=rate,
                    momentum=train.muon_momentum,
                    weight_decay=train.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if rest:
            groups = _adamw_groups(rest, train.weight_decay)
            self.parts.append(
                torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas, fused=True)
            )

    def step(self, learning_rate: float) -> None:
        """Step with this rate; Muon's is in the same proportion to its peak."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = learning_rate * group["peak_ratio"]
            part.step()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> State:
        """What the optimizers remember, by parameter; the tensors themselves, not copies."""
        return {
            name: dict(part.state[parameter])
            for name, parameter in self._parameters.items()
            for part in self.parts
            if parameter in part.state
        }

    def load_state(self, state: State) -> None:
        """Take up what `state` returned, moved to the parameters' devices.

        Raises:
            TrainingError: it knows a parameter that is not trained, or belongs to another optimizer.
        """
        strangers = sorted(state.keys() - self._parameters.keys())
        if strangers:
            raise TrainingError(
                f"the checkpoint's optimizer state has {', '.join(strangers[:3])}, which is not trained",
                expected=f"some of the {len(self._parameters)} trained parameters",
                remedy="remove the checkpoint's folder to train from the start",
            )
        for part in self.parts:
            document = part.state_dict()
            names = self._names_in_order(part)
            document["state"] = {
                number: _fitting(part, name, state[name])
                for number, name in enumerate(names)
                if name in state
            }
            part.load_state_dict(document)

    def _names_in_order(self, part: torch.optim.Optimizer) -> list[str]:
        """Names by the numbers that torch gives parameters in a state dictionary."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        return [names[id(parameter)] for group in part.param_groups for parameter in group["params"]]


def _adamw_groups(parameters: Mapping[str, Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
    groups = [(matrices, weight_decay), (vectors, 0.0)]
    return [
        {"params": members, "weight_decay": decay, "peak_ratio": 1.0} for members, decay in groups if members
    ]


def _fitting(part: torch.optim.Optimizer, name: str, entry: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = REMEMBERED[type(part)]
    if entry.keys() != wanted:
        raise TrainingError(
            f"the checkpoint's optimizer state of {name} is {', '.join(sorted(entry))}",
            expected=", ".join(sorted(wanted)),
            remedy="train with the optimizer of the checkpoint, or remove its folder",
        )
    return dict(entry)
