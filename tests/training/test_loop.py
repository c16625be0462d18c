"""What a step waits for, and what the end of training waits for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.errors import StoreError
from eagle3_core.target.info import TargetInfo
from eagle3_core.training import loop, train
from eagle3_core.training.background import BackgroundSaver
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.ranks import Ranks
from eagle3_core.training.steps import StepPart, StepReader
from tests.training.runs import Quiet, spec_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("packs_per_step", [1, 2])
def test_a_step_does_not_wait_for_the_packs_of_the_next_one(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch, packs_per_step: int
) -> None:
    """So a pack that cannot be read costs no step that is computed."""
    parts = StepReader.parts

    def broken(self: StepReader, *rest: Any) -> Iterator[StepPart]:
        for part in parts(self, *rest):
            if part.step.number == 2:
                raise StoreError("no third step can be read")
            yield part

    monkeypatch.setattr(StepReader, "parts", broken)
    settings = {"packs_per_step": packs_per_step, "pack_tokens": 32}
    spec, quiet = spec_of(tmp_path, tiny_target, train=settings), Quiet()
    with pytest.raises(StoreError, match="no third step"):
        train.run(spec, quiet)  # type: ignore[arg-type]
    assert quiet.steps == [1, 2]


def test_a_long_look_at_the_heldout_split_says_how_far_it_is(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOOK_REPORT_SECONDS", 0.0)
    said: list[tuple[float, str]] = []

    def progress(done: float, total: float | None, unit: str, message: str = "", **more: Any) -> None:
        if unit == "steps":
            said.append((done, message))

    spec = spec_of(tmp_path, tiny_target, train={"num_epochs": 1, "pack_tokens": 32})
    train.run(spec, progress)  # type: ignore[arg-type]
    looks = [(done, message) for done, message in said if "held-out" in message]
    count = len(looks)
    assert count > 1
    assert looks == [
        (said[-1][0], f"epoch 1 of 1, held-out pack {number} of {count}") for number in range(1, count + 1)
    ]


def test_ranks_wait_between_host_memories_until_the_first_one_has_written_the_best_weights(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk may keep it for hours, in which the other GPUs should rest."""
    events: list[str] = []

    def noted(kind: type[Any], name: str) -> None:
        usual = getattr(kind, name)

        def method(self: Any, *arguments: Any) -> Any:
            events.append(name)
            return usual(self, *arguments)

        monkeypatch.setattr(kind, name, method)

    class Noted(Ranks):
        def wait(self) -> None:
            events.append("all ranks")

        def agree_whether(self, value: bool) -> bool:
            events.append("answer")
            return value

    noted(BackgroundSaver, "wait")
    noted(ResumeFolder, "load_weights")
    spec = spec_of(tmp_path, tiny_target, train={"num_epochs": 1})
    train.train_rank(spec, Quiet(), Noted())  # type: ignore[arg-type]
    end = events.index("load_weights")
    assert events[end - 2 : end] == ["wait", "all ranks"]
