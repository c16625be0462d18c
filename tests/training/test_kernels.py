"""The Triton kernels of the training step, interpreted on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from eagle3_core.config import PROJECT_ROOT

pytestmark = pytest.mark.sglang  # the environment with Triton


def test_every_kernel_equals_its_eager_twin_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.training.interpreted_kernels"],
        cwd=PROJECT_ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 10
