"""AdamW and Muon: who steps what, and state that resumes exactly."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch.nn import Parameter

from eagle3_core.errors import TrainingError
from eagle3_core.sections import TrainConfig
from eagle3_core.training.optimizers import Optimizers, muon_names

pytestmark = pytest.mark.engine
SHAPES = {
    "fc.weight": (6, 18),
    "layers.0.self_attn.q_proj.weight": (8, 12),
    "layers.0.input_layernorm.weight": (6,),
    "lm_head.weight": (20, 6),
    "norm.weight": (6,),
}


def _parameters() -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def _train(optimizer: Literal["adamw", "muon"], **settings: float) -> TrainConfig:
    return TrainConfig(optimizer=optimizer, learning_rate=1e-2, weight_decay=0.1, **settings)  # type: ignore[arg-type]


def _steps(parameters: dict[str, Parameter], optimizers: Optimizers, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizers.step(1e-2 / (step + 1))
        optimizers.zero_grad()


def test_muon_leaves_heads_and_vectors_to_adamw() -> None:
    assert muon_names(_parameters()) == ["fc.weight", "layers.0.self_attn.q_proj.weight"]
    state = _stepped("muon").state()
    assert {name: sorted(entry) for name, entry in state.items()} == {
        name: ["momentum_buffer"] if name in muon_names(_parameters()) else ["exp_avg", "exp_avg_sq", "step"]
        for name in SHAPES
    }


def _stepped(kind: Literal["adamw", "muon"]) -> Optimizers:
    parameters = _parameters()
    optimizers = Optimizers(parameters, _train(kind))
    _steps(parameters, optimizers, 0, 1)
    return optimizers


def test_adamw_is_torchs_with_decay_on_matrices_only() -> None:
    ours, theirs = _parameters(), _parameters()
    optimizers = Optimizers(ours, _train("adamw"))
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for parameters in (ours, theirs):
        for parameter in parameters.values():
            parameter.grad = parameter.detach().sin()
    optimizers.step(1e-2)
    plain.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name])


def test_muon_updates_have_the_size_of_adamws_and_follow_the_rate() -> None:
    """An orthogonal update of a 6 x 18 matrix has root mean square 1 / sqrt(18), scaled by 0.2 sqrt(18)."""
    for rate, peak in ((1e-2, None), (5e-3, None), (1e-2, 2e-2)):
        parameters = _parameters()
        before = parameters["fc.weight"].detach().clone()
        train = TrainConfig(optimizer="muon", learning_rate=1e-2, muon_learning_rate=peak)
        optimizers = Optimizers(parameters, train)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        optimizers.step(rate)
        moved = (parameters["fc.weight"].detach() - before).square().mean().sqrt().item()
        assert moved == pytest.approx(0.2 * rate * (peak or 1e-2) / 1e-2, rel=0.35)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_resumed_state_goes_on_exactly(kind: Literal["adamw", "muon"]) -> None:
    straight, stopped = _parameters(), _parameters()
    _steps(straight, Optimizers(straight, _train(kind)), 0, 6)

    first = Optimizers(stopped, _train(kind))
    _steps(stopped, first, 0, 3)
    saved = copy.deepcopy(first.state())
    resumed = {name: Parameter(parameter.detach().clone()) for name, parameter in stopped.items()}
    second = Optimizers(resumed, _train(kind))
    second.load_state(saved)
    _steps(resumed, second, 3, 3)
    assert all(torch.equal(resumed[name], parameter) for name, parameter in straight.items())


def test_state_of_another_optimizer_is_refused_with_both() -> None:
    saved = _stepped("muon").state()
    with pytest.raises(TrainingError, match=r"fc\.weight is momentum_buffer; expected exp_avg"):
        Optimizers(_parameters(), _train("adamw")).load_state(saved)
    with pytest.raises(TrainingError, match=r"has layers\.7\.mlp, which is not trained"):
        Optimizers(_parameters(), _train("muon")).load_state({"layers.7.mlp": {}})
