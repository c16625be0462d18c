"""Resumable checkpoints: whole or absent, the last ones only, refused for another configuration."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import StoreError, TrainingError
from eagle3_core.store.files import hash_file
from eagle3_core.training.checkpoint import ResumeFolder, weights_name
from tests.kills import num_kills
from tests.python_path import python_path

pytestmark = pytest.mark.engine
PLAN = ArtifactPlan(kind="checkpoint", identity={"draft": {"vocab_size": 64}, "train": {"seed": 0}})


def _save(folder: ResumeFolder, step: int, *best: str) -> None:
    folder.save({"step": step, "weight": torch.full((4,), float(step))}, step, best)


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_newest_state_comes_back_and_the_last_ones_are_kept(tmp_path: Path, keep_last: int) -> None:
    folder = ResumeFolder(tmp_path, PLAN, keep_last=keep_last)
    assert folder.load() is None
    for step in (3, 6, 9):
        _save(folder, step)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        f"resume-{step:08d}.pt" for step in (3, 6, 9)[-keep_last:]
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


def test_a_state_without_a_part_is_refused_and_the_part_is_named(tmp_path: Path) -> None:
    _save(ResumeFolder(tmp_path, PLAN), 3)
    assert ResumeFolder(tmp_path, PLAN).load(["step", "weight"]) is not None
    with pytest.raises(
        TrainingError, match=r"resume-00000003\.pt lacks num_steps, position; expected all of"
    ):
        ResumeFolder(tmp_path, PLAN).load(["step", "num_steps", "position"])


def test_a_state_of_an_older_format_is_refused(tmp_path: Path) -> None:
    _save(ResumeFolder(tmp_path, PLAN), 3)
    pointer = tmp_path / "resume.json"
    pointer.write_text(pointer.read_text().replace('"format_version": 2', '"format_version": 1'))
    with pytest.raises(TrainingError, match="in format 1; expected format 2"):
        ResumeFolder(tmp_path, PLAN).load()


def test_another_configuration_is_refused_with_both_values(tmp_path: Path) -> None:
    _save(ResumeFolder(tmp_path, PLAN), 3)
    other = PLAN.model_copy(update={"identity": {"draft": {"vocab_size": 32}, "train": {"seed": 0}}})
    with pytest.raises(TrainingError, match=r"draft\.vocab_size: 32 != 64"):
        ResumeFolder(tmp_path, other).load()


def test_the_best_weights_live_as_long_as_a_checkpoint_names_them(tmp_path: Path) -> None:
    folder = ResumeFolder(tmp_path, PLAN)
    first, second = weights_name(3), weights_name(6)
    folder.save_weights(first, {"a": torch.ones(2)})
    _save(folder, 3, first)
    folder.save_weights(second, {"a": torch.zeros(2)})
    _save(folder, 6, second, first)
    _save(folder, 9, second)
    assert folder.load_weights(first)["a"].tolist() == [1.0, 1.0]
    _save(folder, 12, second)
    assert not (tmp_path / first).exists()
    assert folder.load_weights(second)["a"].tolist() == [0.0, 0.0]
    (tmp_path / "model.safetensors").touch()
    folder.remove(keep=[second])
    assert {path.name for path in tmp_path.iterdir()} == {second, "model.safetensors"}


def test_a_resumed_run_still_knows_the_hash_of_the_best_weights(tmp_path: Path) -> None:
    folder = ResumeFolder(tmp_path, PLAN)
    folder.save_weights(weights_name(3), {"a": torch.ones(2)})
    _save(folder, 3, weights_name(3))
    again = ResumeFolder(tmp_path, PLAN)
    assert again.load() is not None
    _save(again, 6, weights_name(3))
    assert ResumeFolder(tmp_path, PLAN).load() is not None


def check_files(folder: Path) -> int:
    """The newest step of the pointer; all its files are right, and whole is also what it does not name.

    A kill may leave whole files of a step that is not named yet or no longer, and temporary ones.
    """
    newest = json.loads((folder / "resume.json").read_text())["checkpoints"][0]
    assert {name: hash_file(folder / name) for name in newest["files"]} == newest["files"]
    for path in folder.glob("resume-*.pt"):
        assert path.name == f"resume-{torch.load(path, weights_only=True)['step']:08d}.pt"
    for path in folder.glob("best-*.safetensors"):
        assert list(load_file(path)) == ["weight"]
    return int(newest["step"])


KILLED_HALF_WAY = """
import resource, signal, sys, torch
from pathlib import Path
from eagle3_core.training.checkpoint import ResumeFolder, weights_name
from tests.training.test_checkpoint import LARGE_PLAN
folder = ResumeFolder(Path(sys.argv[1]), LARGE_PLAN)
for step in (1, 2, 3):
    large = {name: 1_000_000 if name == sys.argv[2] and step == 3 else 4 for name in ("best", "resume")}
    if step == 3:  # from here on the kernel kills who writes more into a file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    folder.save_weights(weights_name(step), {"weight": torch.full((large["best"],), float(step))})
    state = {"step": step, "weight": torch.full((large["resume"],), float(step))}
    folder.save(state, step, [weights_name(step)])
"""
LARGE_PLAN = PLAN.model_copy(update={"identity": {"note": "x" * 200_000}})


@pytest.mark.parametrize(
    ("file", "max_bytes"), [("best", 2_000_000), ("resume", 2_000_000), ("resume.json", 100_000)]
)
def test_a_writer_killed_half_way_through_a_file_leaves_the_newest_state_whole(
    tmp_path: Path, file: str, max_bytes: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_HALF_WAY, str(tmp_path), file, str(max_bytes)],
        cwd=PROJECT_ROOT,
        env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == -signal.SIGXFSZ
    (unfinished,) = tmp_path.glob(".tmp-*")
    assert unfinished.name.startswith(f".tmp-{file}")
    assert unfinished.stat().st_size == max_bytes
    assert check_files(tmp_path) == 2
    state = ResumeFolder(tmp_path, LARGE_PLAN).load()
    assert state is not None
    assert state["step"] == 2


WRITER = """
import itertools, sys, torch
from pathlib import Path
from eagle3_core.training.background import BackgroundSaver
from eagle3_core.training.checkpoint import ResumeFolder, weights_name
from tests.training.test_checkpoint import PLAN
folder = ResumeFolder(Path(sys.argv[1]), PLAN)
state = folder.load()
saver = BackgroundSaver(folder)
for step in itertools.count(1 + (state["step"] if state else 0)):
    weight = torch.full((1_000_000,), float(step))
    new = weights_name(step)
    saver.save({"step": step, "parameters": {"weight": weight}}, step, [new], new)
    weight.fill_(-1.0)
    saver.wait()
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
            env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        last = int(process.stdout.readline())
        time.sleep(random.uniform(0.0, 0.06))
        process.send_signal(signal.SIGKILL)
        rest = [int(line) for line in process.stdout.read().split()]
        process.wait()
        last = rest[-1] if rest else last
        newest = check_files(tmp_path)
        state = ResumeFolder(tmp_path, PLAN).load()
        assert state is not None
        assert state["step"] == newest  # none was passed over
        assert last <= newest <= last + 1
        assert state["step"] > reached
        best = ResumeFolder(tmp_path, PLAN).load_weights(weights_name(state["step"]))
        for weights in (state["parameters"], best):
            assert weights["weight"].eq(state["step"]).all()
        reached = state["step"]
