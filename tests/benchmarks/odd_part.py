"""A part of the host benchmark that goes as its name says, with a process of its own beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.host_parts import PartSpec, figures_of, serve, tell
from benchmarks.host_signals import give, wait_for

WAIT_SECONDS = 300.0


def measure(spec: PartSpec) -> None:
    """Leave figures, then end well, fail, or go on for ever; early stages end after the part `beside`."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    found: dict[str, Any] = {"child": child.pid, "gpus": os.environ["CUDA_VISIBLE_DEVICES"]}
    found["began"] = time.monotonic()
    spec.save(found)
    tell(f"{spec.name} began")
    if spec.name == "skipped":
        found["skipped"] = "there is nothing to measure"
    if spec.name == "failed":
        raise RuntimeError("the engine is not there")
    if spec.name == "early":
        deadline = time.monotonic() + WAIT_SECONDS
        beside = spec.model_copy(update={"folder": str(spec.common_folder / "beside")})
        while "ended" not in figures_of(beside) and time.monotonic() < deadline:
            time.sleep(0.05)
        found["early_stages_ended"] = time.monotonic()
        give("early-stages-over", spec.common_folder)
        wait_for("other-parts-over", spec.common_folder, WAIT_SECONDS)
        found["went_on"] = time.monotonic()
    while spec.name == "late":
        time.sleep(1)
    spec.save(found | {"ended": time.monotonic()})


if __name__ == "__main__":
    serve(measure)
