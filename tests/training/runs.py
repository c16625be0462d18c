"""Runs the step `train` on a tiny target, in this process or in one that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.contracts import StepSpec
from eagle3_core.store.dataset import Sample
from eagle3_core.store.local import LocalStore
from eagle3_core.target.info import TargetInfo
from tests.python_path import python_path
from tests.training.examples import make_config, make_samples, write_inputs

SAVE_ALWAYS = 1e-6
"""Seconds between checkpoints: one as soon as the one before is written."""
KILLED = """
import json, os, signal, sys, time
from pathlib import Path
from eagle3_core.contracts import StepSpec
from eagle3_core.training import train
spec, step, saved = StepSpec.model_validate_json(Path(sys.argv[1]).read_text()), *map(int, sys.argv[2:4])
pointer = Path(sys.argv[4]) / "resume.json"
def is_saved():
    return pointer.is_file() and json.loads(pointer.read_text())["checkpoints"][0]["step"] >= saved
def progress(done, total, unit, *rest, **more):
    if unit != "steps" or done != step:
        return
    deadline = time.monotonic() + 120
    while not is_saved() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
train.run(spec, progress)
"""


KILLED_WITH_RANKS = """
import sys
from pathlib import Path
from eagle3_core.contracts import StepSpec
from eagle3_core.training import launch, train
launch.RANK_MODULE = "tests.training.odd_rank"
train.run(StepSpec.model_validate_json(Path(sys.argv[1]).read_text()), lambda *some, **more: None)
"""
LEAVING_SECONDS = 120.0
LEAVE = """
from eagle3_core.step import end_process
dist.barrier()
end_process(0)
"""


def run_ranks(code: str, arguments: Sequence[str], count: int) -> None:
    """Run code on ranks of their own; it gets the arguments, its rank and the number of ranks.

    Args:
        code: imports `torch.distributed as dist` and makes its process group.
        arguments: come before the rank and the number of ranks in `sys.argv`.
        count: of the ranks.
    """
    variables = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code + LEAVE, *arguments, str(rank), str(count)],
            cwd=PROJECT_ROOT,
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]


class Quiet:
    """A progress that remembers what it was told: each step once, though a long look repeats the last one."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.figures: dict[str, float] = {}

    def __call__(self, done: float, total: float | None, unit: str, message: str = "", **more: Any) -> None:
        if unit == "steps":
            self.steps += [done] if self.steps[-1:] != [done] else []
            self.figures = more


def spec_of(root: Path, target: TargetInfo, samples: list[Sample] | None = None, **sections: Any) -> StepSpec:
    """A spec with its inputs written below `root`; `sections` are merged over the configuration."""
    return write_inputs(root, make_config(target.path, **sections), target, samples or make_samples(target))


def folder_of(spec: StepSpec) -> Path:
    """The checkpoint's folder."""
    return LocalStore(spec.config.store_path).folder(spec.outputs["checkpoint"].ref)


def records_of(spec: StepSpec, kind: str) -> list[dict[str, Any]]:
    """Records of one type in the metrics."""
    lines = (folder_of(spec) / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["type"] == kind]


def run_killed(spec: StepSpec, step: int, root: Path, saved: int = 1) -> None:
    """Train in another process that is killed when it reports this step and has saved `saved` or a later."""
    (root / "spec.json").write_text(spec.model_dump_json())
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(root / "spec.json"), str(step), str(saved), str(folder_of(spec))],
        cwd=PROJECT_ROOT,
        env=os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    assert (folder_of(spec) / "resume.json").is_file()


def run_killed_with_ranks(spec: StepSpec, step: int, root: Path) -> None:
    """Train with ranks, and kill the process that started them after this step; they end themselves."""
    (root / "spec.json").write_text(spec.model_dump_json())
    marks = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "ODD_RANK": f"0 {step + 1} kill_step"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_WITH_RANKS, str(root / "spec.json")],
        cwd=PROJECT_ROOT,
        env=os.environ | marks | {"ODD_ROOT": str(root), "ODD_STAMP": str(root / "stamp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stdout.decode()[-2000:]
    assert (folder_of(spec) / "resume.json").is_file()
    deadline = time.monotonic() + LEAVING_SECONDS
    while (left := _ranks_of(root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def _ranks_of(root: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("ODD_ROOT") == str(root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
