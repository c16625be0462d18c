"""Noise on auxiliary states: a function of seed, epoch and sample, whatever pack a sample is in.

Legend: R rows of a pack, A auxiliary layers, H hidden size.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from eagle3_core.sections import TrainConfig
from eagle3_core.training.ttt import Pack


def with_noise(pack: Pack, train: TrainConfig, hidden_size: int, epoch: int) -> Pack:
    """The pack with noise on its auxiliary states, or as it is where none is wanted.

    A row's noise in a layer is `train.state_noise_scale` of the root mean square of its state there. It is
    drawn on the states' device, so it is the same on every device of a kind.

    Args:
        pack: [R, A * H] auxiliary states.
        train: kind, scale and seed.
        hidden_size: H.
        epoch: of the run, from 0.
    """
    if train.state_noise == "none":
        return pack
    noisy = pack.aux_states.clone()
    for key, (start, end) in zip(pack.keys, pairwise(pack.plan.offsets), strict=True):
        states = noisy[start:end].unflatten(-1, (-1, hidden_size))
        size = states.float().square().mean(-1, keepdim=True).sqrt() * train.state_noise_scale
        states += (size * _draw(train, epoch, key, states)).to(states.dtype)
    return replace(pack, aux_states=noisy)


def _draw(train: TrainConfig, epoch: int, key: str, states: Tensor) -> Tensor:
    digest = hashlib.sha256(f"{train.seed} {epoch} {key}".encode()).digest()
    generator = torch.Generator(states.device).manual_seed(int.from_bytes(digest[:7], "big"))
    if train.state_noise == "normal":
        return torch.randn(states.shape, generator=generator, device=states.device)
    return 2.0 * torch.rand(states.shape, generator=generator, device=states.device) - 1.0
