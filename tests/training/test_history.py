"""What is kept, when training stops, and that a history survives a checkpoint."""

from __future__ import annotations

import json

import pytest

from eagle3_core.contracts import AcceptanceFigures, EpochMetrics
from eagle3_core.sections import TrainConfig
from eagle3_core.training.history import History

pytestmark = pytest.mark.engine


def figures(length: float) -> AcceptanceFigures:
    return AcceptanceFigures(
        num_speculative_tokens=1,
        acceptance_length=length,
        per_position=[length - 1],
        conditional=[None],
        num_passes=10,
        num_samples=2,
    )


def look(step: int, length: float) -> EpochMetrics:
    return EpochMetrics(
        epoch=step // 10,
        step=step,
        train_loss=2.0,
        heldout_loss=2.0,
        heldout=figures(length),
        learning_rate=1e-3,
        seconds=1.0,
    )


def history(*lengths: float, keep: int = 1) -> History:
    made = History()
    for number, length in enumerate(lengths):
        made.add(look(10 * (number + 1), length), figures(length + 0.5), keep)
    return made


def test_weights_are_written_only_when_they_are_among_the_best() -> None:
    made = history(1.5, 1.8)
    assert made.add(look(30, 1.7), figures(1.0), keep=1) is None
    assert made.add(look(40, 1.75), figures(1.0), keep=2) == "best-00000040.safetensors"
    assert made.best_files(2) == ["best-00000020.safetensors", "best-00000040.safetensors"]
    assert made.best == 1
    assert made.benchmarks[made.best].acceptance_length == pytest.approx(2.3)


def test_the_best_is_the_draft_and_the_others_lie_beside_it() -> None:
    kept = history(1.5, 1.8, 1.6).kept(2, "model.safetensors")
    assert [(one.step, one.epoch, one.acceptance_length, one.file) for one in kept] == [
        (20, 2, 1.8, "model.safetensors"),
        (30, 3, 1.6, "best-00000030.safetensors"),
    ]


def test_why_training_stops_is_said_with_figures() -> None:
    train = TrainConfig(early_stop_evaluations=2, early_stop_min_gain=0.1)
    assert history(1.5, 1.55).early_stop(train) == ""
    assert history(1.5, 1.55, 1.58).early_stop(train) == (
        "stopped early at step 30: 2 evaluations without a gain of 0.1 in held-out acceptance "
        "length, of which the best is 1.580"
    )
    assert history(1.5, 1.4, 1.3).early_stop(TrainConfig()) == ""


def test_a_history_survives_a_checkpoint() -> None:
    made = history(1.5, 1.8)
    made.recent.add(2.0, 1.0, window=16)
    made.recent.num_skipped = 3
    made.num_empty_packs = 2
    assert History.read(json.loads(json.dumps(made.document()))) == made
