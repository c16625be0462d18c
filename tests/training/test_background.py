"""Checkpoints in a thread: a state may change once it was handed over, errors come back, the end waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.errors import DiskFullError
from eagle3_core.training.background import BackgroundSaver
from eagle3_core.training.checkpoint import ResumeFolder, weights_name

pytestmark = pytest.mark.engine
PLAN = ArtifactPlan(kind="checkpoint", identity={"for": "a test"})


WAIT_SECONDS = 120.0


class SlowFolder(ResumeFolder):
    """Begins to write when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, PLAN)
        self.is_asked, self.may_go_on = threading.Event(), threading.Event()
        self.started: list[int] = []
        self.error: Exception | None = None

    def save(self, state: dict[str, Any], step: int, best: Any = ()) -> None:
        self.started.append(step)
        self.is_asked.set()
        assert self.may_go_on.wait(WAIT_SECONDS)
        if self.error:
            raise self.error
        super().save(state, step, best)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowFolder]:
    folder = SlowFolder(tmp_path)
    yield folder
    folder.may_go_on.set()


def state(value: float) -> dict[str, Any]:
    tensor = torch.full((1000,), value)
    return {
        "parameters": {"a": tensor},
        "optimizer": {"a": {"m": tensor + 1}},
        "position": {"losses": [value]},
    }


def saved(folder: Path) -> tuple[float, float, float]:
    found = ResumeFolder(folder, PLAN).load()
    assert found is not None
    first, second = found["parameters"]["a"], found["optimizer"]["a"]["m"]
    assert first.eq(first[0]).all()
    return float(first[0]), float(second[0]), found["position"]["losses"][0]


def test_what_is_written_is_what_was_handed_over_whatever_training_does_meanwhile(
    slow: SlowFolder, tmp_path: Path
) -> None:
    with BackgroundSaver(slow) as saver:
        live = state(1.0)
        saver.save(live, 1)
        assert saver.is_busy
        live["parameters"]["a"].fill_(-5.0)
        live["optimizer"]["a"]["m"].fill_(-5.0)
        live["position"]["losses"][0] = -5.0
        slow.may_go_on.set()
        saver.wait()
        assert saved(tmp_path) == (1.0, 2.0, 1.0)


def test_one_is_written_at_a_time_and_the_end_waits_for_the_last(slow: SlowFolder, tmp_path: Path) -> None:
    with BackgroundSaver(slow) as saver:
        saver.save(state(1.0), 1)
        second = threading.Thread(target=saver.save, args=(state(2.0), 2))
        second.start()
        assert slow.is_asked.wait(WAIT_SECONDS)
        second.join(0.2)
        assert second.is_alive()
        assert slow.started == [1]
        slow.may_go_on.set()
        second.join(WAIT_SECONDS)
        saver.save(state(3.0), 3)
    assert slow.started == [1, 2, 3]
    assert saved(tmp_path) == (3.0, 4.0, 3.0)


def test_the_best_weights_are_written_before_the_checkpoint_that_names_them(tmp_path: Path) -> None:
    folder = ResumeFolder(tmp_path, PLAN)
    with BackgroundSaver(folder) as saver:
        saver.save(state(1.0), 1, [weights_name(1)], weights_name(1))
        saver.save(state(2.0), 2, [weights_name(1)])
    assert saved(tmp_path)[0] == 2.0
    assert folder.load_weights(weights_name(1))["a"].eq(1.0).all()


def test_what_the_thread_could_not_do_reaches_training_at_its_next_call(slow: SlowFolder) -> None:
    slow.error = DiskFullError("no space")
    slow.may_go_on.set()
    saver = BackgroundSaver(slow)
    for call in (lambda: saver.save(state(2.0), 2), saver.wait):
        saver.save(state(1.0), 1)
        with pytest.raises(DiskFullError, match="no space"):
            call()
    saver.save(state(1.0), 1)
    assert saver._job is not None
    saver._job.join()
    with pytest.raises(DiskFullError, match="no space"):
        saver.check()
    saver.check()


def test_training_that_fails_still_finishes_its_last_checkpoint_and_keeps_its_own_error(
    slow: SlowFolder, tmp_path: Path
) -> None:
    def fail() -> None:
        with BackgroundSaver(slow) as saver:
            saver.save(state(1.0), 1)
            threading.Timer(0.2, slow.may_go_on.set).start()
            raise ValueError("training")

    with pytest.raises(ValueError, match="training"):
        fail()
    assert saved(tmp_path)[0] == 1.0


def test_memory_is_taken_once_for_each_of_two_copies(tmp_path: Path) -> None:
    taken = set()

    class Watched(ResumeFolder):
        def save(self, state: dict[str, Any], step: int, best: Any = ()) -> None:
            taken.add(state["parameters"]["a"].data_ptr())

    with BackgroundSaver(Watched(tmp_path, PLAN)) as saver:
        for step in range(6):
            saver.save(state(float(step)), step)
    assert len(taken) == 2
