"""A part of the host benchmark that goes as its name says, with a process of its own beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.host_parts import PartSpec, serve, tell


def measure(spec: PartSpec) -> None:
    """Leave a figure, then end well, fail, or go on for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    spec.save({"child": child.pid, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]})
    tell(f"{spec.name} began")
    if spec.name == "skipped":
        spec.save({"skipped": "there is nothing to measure"})
    if spec.name == "failed":
        raise RuntimeError("the engine is not there")
    while spec.name == "late":
        time.sleep(1)


if __name__ == "__main__":
    serve(measure)
