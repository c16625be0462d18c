"""Which weights stay, when training stops, and which files may go."""

from __future__ import annotations

import random

import pytest

from eagle3_core.training.selection import (
    Entry,
    best_evaluations,
    evaluations_without_gain,
    removable,
    should_stop,
    with_newest,
)


def entry(step: int, *best: int) -> Entry:
    file = f"resume-{step:08d}.pt"
    return Entry(step, file, dict.fromkeys([file, *(f"best-{n:08d}.safetensors" for n in best)], "hash"))


def test_the_best_come_first_and_of_equal_ones_the_earlier() -> None:
    assert best_evaluations([1.5, 2.0, 1.8, 2.0], 1) == [1]
    assert best_evaluations([1.5, 2.0, 1.8, 2.0], 3) == [1, 3, 2]
    assert best_evaluations([1.5], 3) == [0]
    assert best_evaluations([], 2) == []


@pytest.mark.parametrize(
    ("lengths", "gain", "since"),
    [
        ([], 0.0, 0),
        ([2.0], 0.5, 0),
        ([2.0, 2.1, 2.05, 2.1], 0.0, 2),
        ([2.0, 2.05, 2.08], 0.1, 2),
        ([2.0, 2.05, 2.08, 2.11], 0.1, 0),
        ([2.0, 1.0, 1.5, 1.9], 0.0, 3),
    ],
)
def test_evaluations_without_gain_are_counted(lengths: list[float], gain: float, since: int) -> None:
    assert evaluations_without_gain(lengths, gain) == since


def test_training_stops_after_so_many_evaluations_without_gain_and_never_by_default() -> None:
    lengths = [2.0, 2.1, 2.0, 2.0]
    assert not should_stop(lengths[:3], 2, 0.0)
    assert should_stop(lengths, 2, 0.0)
    assert not should_stop(lengths, None, 0.0)


def test_a_checkpoint_of_the_same_step_is_replaced() -> None:
    entries = with_newest([entry(6), entry(3)], entry(6, 6), keep_last=2)
    assert [(each.step, len(each.files)) for each in entries] == [(6, 2), (3, 1)]
    assert [each.step for each in with_newest(entries, entry(9), keep_last=2)] == [9, 6]


def test_only_files_of_a_resume_that_nothing_needs_are_removable() -> None:
    names = ["resume-00000003.pt", "resume-00000006.pt", "best-00000003.safetensors", "model.safetensors"]
    names += ["metrics.jsonl", "manifest.json", ".lock", "best-00000001.safetensors"]
    assert removable(names, [entry(6, 3)]) == ["best-00000001.safetensors", "resume-00000003.pt"]
    assert removable(names, [entry(6, 3)], keep=["best-00000001.safetensors"]) == ["resume-00000003.pt"]


def test_whatever_the_acceptance_no_checkpoint_ever_misses_a_file_and_none_too_many_lie_there() -> None:
    generator = random.Random(5)
    for _ in range(200):
        keep_last, keep_best = generator.randint(1, 4), generator.randint(1, 4)
        lengths: list[float] = []
        there: set[str] = set()
        entries: list[Entry] = []
        for step in range(12):
            lengths.append(round(generator.uniform(1, 2), 1))
            best = best_evaluations(lengths, keep_best)
            newest = entry(step, *best)
            if step in best:
                there.add(f"best-{step:08d}.safetensors")
            there.add(newest.file)
            entries = with_newest(entries, newest, keep_last)
            assert all(set(each.files) <= there for each in entries)
            there -= set(removable(there, entries))
            assert all(set(each.files) <= there for each in entries)
            assert len([name for name in there if name.startswith("best")]) <= keep_best + keep_last - 1
            assert len([name for name in there if name.startswith("resume")]) <= keep_last
