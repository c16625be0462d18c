"""Engine processes as forks of one that has imported what they need."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from benchmarks.capture_process import Worker, close_all
from benchmarks.engine_forks import ForkedWorker, begin_import
from eagle3_core.errors import CaptureError
from tests.benchmarks import odd_worker

pytestmark = pytest.mark.engine


def start(spec: Path, mode: str, variables: dict[str, str]) -> ForkedWorker:
    return ForkedWorker(spec, mode, variables, odd_worker.main)


def test_forks_share_one_import_have_variables_of_their_own_and_end_when_asked(tmp_path: Path):
    (tmp_path / "mla").mkdir()
    with patch.dict(os.environ):
        begin_import({"ODD_COMMON": "all"}, "tests.benchmarks.odd_worker")
        workers = [
            Worker(tmp_path / "spec.json", mode, {"ODD_OWN": mode}, False, start)
            for mode in ("plain", "capture")
        ]
        failing = Worker(tmp_path / "mla" / "spec.json", "plain", {}, False, start)
    loaded = [worker.ask("load") for worker in workers]
    assert [each["variables"] for each in loaded] == [["all", "plain"], ["all", "capture"]]
    assert len({each["imported_in"] for each in loaded}) == 1
    assert loaded[0]["imported_in"] not in {each["pid"] for each in loaded} | {os.getpid()}
    assert workers[0].ask("round 1")["tokens"] == 100
    with pytest.raises(CaptureError, match="no memory is left on the GPU"):
        failing.ask("load")
    close_all([*workers, failing], 60.0)
    assert not any(psutil.pid_exists(each["pid"]) for each in loaded)


def test_a_fork_that_does_not_end_is_ended(tmp_path: Path):
    (tmp_path / "mla" / "tensor_parallel").mkdir(parents=True)
    process = start(tmp_path / "mla" / "tensor_parallel" / "spec.json", "plain", {})
    process.stdin.write("load\n")
    process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    assert process.poll() is None
    psutil.Process(process.pid).kill()
    assert process.wait(60) == -9
