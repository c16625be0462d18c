"""Noise on auxiliary states: by seed, epoch and sample alone."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.sections import TrainConfig
from eagle3_core.target.info import TargetInfo
from eagle3_core.training.loader import build_pack
from eagle3_core.training.noise import with_noise
from eagle3_core.training.ttt import Pack
from tests.training.examples import random_sample

pytestmark = pytest.mark.engine
KINDS = {"uniform": 1 / 3**0.5, "normal": 1.0}
"""Standard deviation of each kind at scale 1."""


def _pack(target: TargetInfo, *numbers: int) -> Pack:
    mask = [0] * 10 + [1] * 20
    return build_pack([random_sample(target, mask, f"s{n}", seed=n) for n in numbers], 2)


def test_none_leaves_the_pack_alone(tiny_target: TargetInfo) -> None:
    pack = _pack(tiny_target, 0)
    assert with_noise(pack, TrainConfig(), 64, 0) is pack


@pytest.mark.parametrize("kind", KINDS)
def test_a_samples_noise_is_the_same_in_any_pack(kind: str, tiny_target: TargetInfo) -> None:
    train = TrainConfig(state_noise=kind, state_noise_scale=0.1, seed=3)  # type: ignore[arg-type]
    both, alone = _pack(tiny_target, 0, 1), _pack(tiny_target, 1)
    noisy = with_noise(alone, train, 64, epoch=2).aux_states
    assert torch.equal(with_noise(both, train, 64, epoch=2).aux_states[29:], noisy)
    assert not torch.equal(with_noise(alone, train, 64, epoch=1).aux_states, noisy)
    other = train.model_copy(update={"seed": 4})
    assert not torch.equal(with_noise(alone, other, 64, epoch=2).aux_states, noisy)
    assert torch.equal(alone.aux_states, _pack(tiny_target, 1).aux_states)


@pytest.mark.parametrize(("kind", "deviation"), KINDS.items())
def test_noise_follows_the_size_of_each_layers_state(
    kind: str, deviation: float, tiny_target: TargetInfo
) -> None:
    train = TrainConfig(state_noise=kind, state_noise_scale=0.1)  # type: ignore[arg-type]
    pack = _pack(tiny_target, 0)
    layers = pack.aux_states.unflatten(-1, (-1, 64))
    layers *= torch.tensor([1.0, 10.0, 100.0])[:, None]
    noise = with_noise(pack, train, 64, 0).aux_states.unflatten(-1, (-1, 64)) - layers
    size = layers.square().mean(-1, keepdim=True).sqrt()
    relative = (noise / size).std(dim=(0, 2))
    torch.testing.assert_close(relative, torch.full((3,), 0.1 * deviation), rtol=0.05, atol=0)
