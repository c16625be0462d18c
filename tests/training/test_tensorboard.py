"""Event files as TensorBoard itself reads them: the records of the metrics, each once."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.training.metrics_log import MetricsLog
from eagle3_core.training.tensorboard import event_files, scalars

pytestmark = pytest.mark.engine


def step(number: int, loss: float) -> dict[str, Any]:
    return {
        "type": "step",
        "step": number,
        "time": 1000.0 + number,
        "loss": loss,
        "loss_by_step": [loss / 2, loss / 2],
        "mfu": None,
        "learning_rate": 0.5,
    }


EVALUATION = {
    "type": "evaluation",
    "step": 3,
    "time": 1004.0,
    "heldout_loss": 1.5,
    "heldout": {"acceptance_length": 2.25, "per_position": [0.75, 0.5]},
    "rates": {"unconditional": [0.75, 0.6], "conditional": [0.75, None]},
}


def read(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(e.step, e.value, e.wall_time) for e in found.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_what_the_metrics_say(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, event_files(tmp_path / "tensorboard"))
    log.cut(0)
    log.append([step(1, 4.0), step(2, 3.0)])
    log.append([EVALUATION])
    log.close()
    found = read(tmp_path / "tensorboard")
    assert found["step/loss"] == [(1, 4.0, 1001.0), (2, 3.0, 1002.0)]
    assert found["loss_by_ttt_step/1"] == [(1, 2.0, 1001.0), (2, 1.5, 1002.0)]
    assert found["heldout/acceptance_length"] == [(3, 2.25, 1004.0)]
    assert "step/mfu" not in found
    assert "heldout_conditional_by_ttt_step/1" not in found


def test_after_a_resume_no_point_is_there_twice(tmp_path: Path) -> None:
    folder = tmp_path / "tensorboard"
    log = MetricsLog(tmp_path, event_files(folder))
    log.cut(0)
    log.append([step(1, 4.0)])
    length = log.sync()
    log.append([step(2, 9.0), step(3, 9.0)])
    log.close()
    log = MetricsLog(tmp_path, event_files(folder))
    log.cut(length)
    log.append([step(2, 3.0)])
    log.close()
    assert len(list(folder.iterdir())) == 1
    assert [(number, value) for number, value, _ in read(folder)["step/loss"]] == [(1, 4.0), (2, 3.0)]


def test_values_that_are_not_finite_are_left_out_and_skipped_steps_are_points() -> None:
    assert "step/loss" not in scalars(step(1, float("nan")))
    assert scalars({"type": "skipped", "step": 4, "reason": "it is not finite"}) == {"step/skipped": 1.0}


def test_without_tensorboard_training_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert event_files(tmp_path) is None
    assert "no TensorBoard files" in caplog.text
