"""Resumable checkpoints: whole or absent, at most two, refused for another configuration."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import StoreError, TrainingError
from eagle3_core.training.checkpoint import MetricsLog, ResumeFolder
from tests.kills import num_kills

pytestmark = pytest.mark.engine
PLAN = ArtifactPlan(kind="checkpoint", identity={"draft": {"vocab_size": 64}, "train": {"seed": 0}})


def _save(folder: ResumeFolder, step: int, best: str | None = None) -> None:
    folder.save({"step": step, "weight": torch.full((4,), float(step))}, step, best)


def test_the_newest_state_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    folder = ResumeFolder(tmp_path, PLAN)
    assert folder.load() is None
    for step in (3, 6, 9):
        _save(folder, step)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "resume-00000006.pt",
        "resume-00000009.pt",
    ]
    state = ResumeFolder(tmp_path, PLAN).load()
    assert state is not None
    assert state["step"] == 9
    assert state["weight"].tolist() == [9.0] * 4


def test_a_damaged_newest_state_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    folder = ResumeFolder(tmp_path, PLAN)
    _save(folder, 3)
    _save(folder, 6)
    newest = tmp_path / "resume-00000006.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    state = ResumeFolder(tmp_path, PLAN).load()
    assert state is not None
    assert state["step"] == 3
    (tmp_path / "resume-00000003.pt").unlink()
    with pytest.raises(StoreError, match=r"no checkpoint can be resumed.*is missing"):
        ResumeFolder(tmp_path, PLAN).load()


def test_another_configuration_is_refused_with_both_values(tmp_path: Path) -> None:
    _save(ResumeFolder(tmp_path, PLAN), 3)
    other = PLAN.model_copy(update={"identity": {"draft": {"vocab_size": 32}, "train": {"seed": 0}}})
    with pytest.raises(TrainingError, match=r"draft\.vocab_size: 32 != 64"):
        ResumeFolder(tmp_path, other).load()


def test_the_best_weights_live_as_long_as_a_checkpoint_names_them(tmp_path: Path) -> None:
    folder = ResumeFolder(tmp_path, PLAN)
    first = folder.save_best({"a": torch.ones(2)}, 0)
    _save(folder, 3, first)
    second = folder.save_best({"a": torch.zeros(2)}, 1)
    _save(folder, 6, second)
    assert folder.load_best(first)["a"].tolist() == [1.0, 1.0]
    _save(folder, 9, second)
    assert not (tmp_path / first).exists()
    assert folder.load_best(second)["a"].tolist() == [0.0, 0.0]
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append([{"step": 1}, {"step": 2}])
    length = log.sync()
    log.append([{"step": 3}])
    log.close()
    log = MetricsLog(tmp_path)
    log.cut(length)
    log.append([{"step": 3, "again": True}])
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1}', '{"step": 2}', '{"step": 3, "again": true}']
    with pytest.raises(StoreError, match="the checkpoint was made at 9,999"):
        MetricsLog(tmp_path).cut(9999)


WRITER = """
import itertools, sys, torch
from pathlib import Path
from eagle3_core.training.checkpoint import ResumeFolder
from tests.training.test_checkpoint import PLAN
folder = ResumeFolder(Path(sys.argv[1]), PLAN)
state = folder.load()
for step in itertools.count(1 + (state["step"] if state else 0)):
    best = folder.save_best({"a": torch.full((500_000,), float(step))}, step)
    folder.save({"step": step, "weight": torch.full((1_000_000,), float(step))}, step, best)
    print(step, flush=True)
"""


@pytest.mark.timeout(3600)
def test_a_writer_killed_at_any_moment_leaves_a_loadable_newest_state(tmp_path: Path) -> None:
    reached = 0
    for _ in range(num_kills(4)):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=PROJECT_ROOT,
            env=os.environ | {"PYTHONPATH": str(PROJECT_ROOT), "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        last = int(process.stdout.readline())
        time.sleep(random.uniform(0.0, 0.06))
        process.send_signal(signal.SIGKILL)
        rest = [int(line) for line in process.stdout.read().split()]
        process.wait()
        last = rest[-1] if rest else last
        state = ResumeFolder(tmp_path, PLAN).load()
        assert state is not None
        assert last <= state["step"] <= last + 1
        assert state["step"] > reached
        assert state["weight"].eq(state["step"]).all()
        reached = state["step"]
