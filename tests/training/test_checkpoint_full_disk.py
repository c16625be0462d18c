"""Checkpoints on a disk that becomes full: the one before stays, and the save is done when there is space."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.errors import DiskFullError
from eagle3_core.sections import LimitsConfig
from eagle3_core.store import disk
from eagle3_core.store.disk import DiskGuard, guarding
from eagle3_core.training.checkpoint import ResumeFolder
from eagle3_core.training.metrics_log import MetricsLog
from tests.disks import SmallDisk, small_disk

pytestmark = pytest.mark.engine
PLAN = ArtifactPlan(kind="checkpoint", identity={"for": "a test"})
MIB = 1 << 20
ELEMENTS = MIB // 4
WAIT_SECONDS = 120.0


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """A disk for two checkpoints of one MiB and a half."""
    monkeypatch.setattr(disk, "POLL_SECONDS", 0.05)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with small_disk(tmp_path / "disk", 5 * MIB // 2) as mounted:
        yield mounted


def save(folder: ResumeFolder, step: int) -> None:
    folder.save({"step": step, "weight": torch.full((ELEMENTS,), float(step))}, step)


def newest(path: Path) -> int:
    state = ResumeFolder(path, PLAN).load()
    assert state is not None
    return int(state["step"])


def limits(policy: str) -> LimitsConfig:
    return LimitsConfig(min_free_disk_gib=0, on_full_disk=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("knows_free_space", [True, False])
def test_a_save_waits_for_space_and_the_earlier_ones_stay_valid(
    full: SmallDisk, monkeypatch: pytest.MonkeyPatch, knows_free_space: bool
) -> None:
    """Once because it asked, once because the write itself found no space."""
    reasons: list[str | None] = []
    unfinished: list[Path] = []

    def report(reason: str | None) -> None:  # by the thread that saves: it writes nothing meanwhile
        unfinished.extend(full.path.glob(".tmp-*"))
        reasons.append(reason)

    if not knows_free_space:
        monkeypatch.setattr(DiskGuard, "make_room", lambda *_: None)
    with guarding(DiskGuard(limits("pause"), None, report)):
        folder = ResumeFolder(full.path, PLAN)
        save(folder, 1)
        save(folder, 2)
        late = threading.Thread(target=save, args=(folder, 3))
        late.start()
        deadline = time.monotonic() + WAIT_SECONDS
        while not reasons:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert newest(full.path) == 2
        assert str(reasons[0]).startswith("paused: no space: ")
        full.resize(8 * MIB)
        late.join(WAIT_SECONDS)
    assert reasons[-1] is None
    assert unfinished == []
    assert newest(full.path) == 3


def test_by_policy_a_save_fails_and_the_earlier_ones_stay_valid(
    full: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ResumeFolder(full.path, PLAN)
    with guarding(DiskGuard(limits("fail"))):
        save(folder, 1)
        save(folder, 2)
        with pytest.raises(DiskFullError, match=r"for resume-00000003\.pt; make room"):
            save(folder, 3)
        monkeypatch.setattr(DiskGuard, "make_room", lambda *_: None)
        with pytest.raises(DiskFullError, match=r"for resume-00000003\.pt; make room"):
            save(folder, 3)
    assert newest(full.path) == 2
    full.resize(8 * MIB)
    save(folder, 3)
    assert newest(full.path) == 3


def test_lines_of_the_metrics_are_whole_after_a_full_disk(full: SmallDisk) -> None:
    is_full = threading.Event()
    with guarding(DiskGuard(limits("pause"), None, lambda _: is_full.set())):
        metrics = MetricsLog(full.path)
        late = threading.Thread(
            target=lambda: [metrics.append([{"number": n, "text": "x" * 100_000}]) for n in range(40)]
        )
        late.start()
        assert is_full.wait(WAIT_SECONDS)
        assert late.is_alive()
        full.resize(8 * MIB)
        late.join(WAIT_SECONDS)
        metrics.close()
    lines = (full.path / "metrics.jsonl").read_text().splitlines()
    assert [line[:13] for line in lines] == [f'{{"number": {n},'[:13] for n in range(40)]
    assert {len(line) > 100_000 for line in lines} == {True}
