"""The step boundary as a process: result file, exit codes, progress, the end with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.contracts import EngineInfoSpec, ProgressEvent, StepOutcome
from eagle3_core.errors import EXIT_BUG, EXIT_OK, EXIT_PARENT_GONE, EXIT_USER_ERROR
from eagle3_core.step import PROGRESS_PREFIX, Progress

pytestmark = pytest.mark.both


STEP = """
import os, sys, time, types
from eagle3_core import step
from eagle3_core.contracts import EngineInfoResult
from eagle3_core.errors import HostError
def run(spec, progress):
    {body}
    return EngineInfoResult(python="3", packages={{}}, device_names=[], num_threads=2)
module = types.ModuleType("made_up")
module.run = run
sys.modules["made_up"] = module
step.STEPS["engine_info"] = "made_up"
step.end_process(step.main(["engine_info", *sys.argv[1:]]))
"""


def start(tmp_path, body):
    spec, result = tmp_path / "spec.json", tmp_path / "result.json"
    spec.write_text(EngineInfoSpec().model_dump_json())
    command = [sys.executable, "-c", STEP.format(body=body), str(spec), str(result)]
    process = subprocess.Popen(
        command, cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, result


def run_open(tmp_path, body):
    """Exit code, outcome and output of a step whose standard input stays open until it has ended."""
    process, result = start(tmp_path, body)
    output = process.stdout.read()
    process.wait(timeout=120)
    process.stdin.close()
    return process.returncode, StepOutcome.model_validate_json(result.read_bytes()), output


def test_a_result_is_left_and_the_exit_code_is_zero(tmp_path):
    code, left, _ = run_open(tmp_path, "pass")
    assert (code, left.status, left.result["num_threads"]) == (EXIT_OK, "ok", 2)


def test_an_error_for_the_user_is_one_line_without_traceback(tmp_path):
    code, left, output = run_open(tmp_path, "raise HostError('no GPU', remedy='plug one in')")
    assert code == EXIT_USER_ERROR
    assert left.failure.message == "no GPU; plug one in"
    assert left.failure.is_user_error
    assert output.strip() == "step engine_info failed: no GPU; plug one in"


def test_a_bug_has_its_traceback_in_the_output(tmp_path):
    code, left, output = run_open(tmp_path, "raise ValueError('odd')")
    assert code == EXIT_BUG
    assert left.failure.message == "ValueError: odd"
    assert "Traceback (most recent call last)" in output


def test_a_step_ends_with_its_children_when_its_standard_input_closes(tmp_path):
    body = (
        "import subprocess; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); "
        "print(child.pid, flush=True); time.sleep(300)"
    )
    process, result = start(tmp_path, body)
    child = int(process.stdout.readline())
    process.stdin.close()
    assert process.wait(timeout=120) == EXIT_PARENT_GONE
    deadline = time.monotonic() + 120
    while _is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(child)
    assert not result.exists()


def test_a_step_without_a_free_descriptor_ends_too_when_its_standard_input_closes(tmp_path):
    body = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); "
        "print('ready', flush=True); time.sleep(300)"
    )
    process, _ = start(tmp_path, body)
    assert process.stdout.readline() == "ready\n"
    process.stdin.close()
    assert process.wait(timeout=120) == EXIT_PARENT_GONE


def test_progress_is_rate_limited_but_the_end_is_always_told(capfd):
    progress = Progress("train")
    for step in range(1001):
        progress(step, 1000, "steps", loss=2.0)
    lines = capfd.readouterr().out.splitlines()
    events = [ProgressEvent.model_validate(json.loads(line.removeprefix(PROGRESS_PREFIX))) for line in lines]
    assert events[0].done == 0
    assert events[-1].done == 1000
    assert len(events) < 10
    assert events[-1].metrics == {"loss": 2.0}


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return os.path.exists(f"/proc/{pid}")
