"""The session's side of the conversation with its step."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eagle3_core.config import PROJECT_ROOT

pytestmark = pytest.mark.engine

FORKS_WHILE_IT_LISTENS = """
import multiprocessing, os, types
from eagle3_core.capture.session import _Line

line = _Line(types.SimpleNamespace(shards=()), [])
print("answer", line._answers.get().strip(), flush=True)
child = multiprocessing.get_context("fork").Process(target=print, args=("from the child",))
child.start()
child.join(120)
print("exit code", child.exitcode, flush=True)
os._exit(0)
"""


def test_an_engine_may_fork_while_the_session_waits_for_its_step() -> None:
    """A forked child closes its standard input first, which the listening thread must not hold."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS_WHILE_IT_LISTENS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT_ROOT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("3\n")
    process.stdin.flush()
    lines = process.stdout.read().splitlines()
    process.kill()
    assert lines == ["answer 3", "from the child", "exit code 0"]
