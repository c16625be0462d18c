"""Two GPUs train as one does, with weights whole or sharded.

`python -m pytest -m gpu tests/gpu/test_training_ranks.py` on a host with two GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle3_core.contracts import StepSpec, TrainResult
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.training import train
from tests.tiny import make_tiny_target
from tests.training.examples import make_samples
from tests.training.runs import Quiet, spec_of
from tests.training.test_ranks import expect_agreement

pytestmark = [pytest.mark.engine, pytest.mark.gpu]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetInfo:
    folder = tmp_path_factory.mktemp("tiny")
    return inspect_target(
        make_tiny_target(folder, num_layers=4, hidden_size=128, vocab_size=300, tokenizer_size=290)
    )


def trained(root: Path, target: TargetInfo, num_ranks: int, mode: str) -> tuple[StepSpec, TrainResult]:
    """Seven packs an epoch in steps of two."""
    settings = {"pack_tokens": 64, "packs_per_step": 2, "num_ranks": num_ranks, "parallel": mode}
    samples = make_samples(target, 21, 4)
    spec = spec_of(root, target, samples, train=settings, engine={"device": "cuda"})
    return spec, train.run(spec, Quiet())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, target: TargetInfo) -> tuple[StepSpec, TrainResult]:
    return trained(tmp_path_factory.mktemp("alone"), target, 1, "auto")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_gpus_agree_with_one(
    mode: str, tmp_path: Path, target: TargetInfo, alone: tuple[StepSpec, TrainResult]
) -> None:
    expect_agreement(trained(tmp_path, target, 2, mode), alone, tolerance=1e-3)
