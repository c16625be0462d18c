"""The parts of the host benchmark: each runs in a process of its own, within a limit of time.

A part writes what it has measured to a file as soon as it is known, so that one that is ended leaves what it
had. All that a part prints goes to its log; lines that begin with `MARK` are shown to whoever waits.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.host.process import Supervisor, describe_status
from eagle3_core.host.process_tree import STEP_VARIABLE, step_variable
from eagle3_core.step import end_with_parent
from eagle3_core.store.files import write_atomic

MARK = "@host "
PREFIX_VARIABLE = "PYTHONPYCACHEPREFIX"
LAST_LINES = 15
END_SECONDS = 12.0
"""Kept back of the whole time: processes that are ended get a few seconds to end."""
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""NVLink multicast stays off, but for what the environment says otherwise."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: as the command line takes it.
        module: run by `python -m`.
        share: of the whole time, beside the shares of the other parts.
        begins_early: whether its first stages run beside other parts while these import and load; it gives
            `early-stages-over` after them, and goes on when `other-parts-over` is given.
        is_alone: whether it has to wait for the end of these early stages.
    """

    name: str
    module: str
    share: float
    begins_early: bool = False
    is_alone: bool = False


PARTS = (
    Part("topology", "benchmarks.host_topology", 30),
    Part("capture", "benchmarks.host_capture", 165),
    Part("training", "benchmarks.host_training", 150, is_alone=True),
    Part("smollm2", "benchmarks.host_run", 123, begins_early=True),
)
"""In the order in which they end; shares are seconds of eight minutes without `END_SECONDS`."""


class PartSpec(BaseModel):
    """What a part is started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    gpus: int
    device: Literal["cpu", "cuda"]
    shape: Literal["8b", "tiny"]
    target: str | None
    folder: str
    devices: tuple[str, ...]
    """GPUs as `CUDA_VISIBLE_DEVICES` names them; none on the CPU, where processes stand for GPUs."""
    seconds: float = 600.0
    """After which the part is ended."""

    @property
    def figures_path(self) -> Path:
        """The file of what was measured."""
        return Path(self.folder) / "figures.json"

    @property
    def common_folder(self) -> Path:
        """In which the folders of all parts lie."""
        return Path(self.folder).parent

    def save(self, figures: Mapping[str, Any]) -> None:
        """Leave what is known so far."""
        write_atomic(self.figures_path, json.dumps(figures, indent=1))


class PartOutcome(BaseModel):
    """How a part went.

    `skipped` parts had nothing to measure, `late` ones were ended at their limit; both of these and `failed`
    ones keep the figures that they had left by then. `running` is what a document says meanwhile.
    """

    model_config = ConfigDict(frozen=True)
    name: str
    state: Literal["running", "done", "skipped", "failed", "late"]
    seconds: float
    limit_seconds: float
    reason: str = ""
    figures: dict[str, Any] = {}
    last_lines: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether nothing went wrong."""
        return self.state in ("done", "skipped")


def limit_of(name: str, waiting: Sequence[Part], seconds_left: float) -> float:
    """Seconds that a part may take: its share of the time left, beside the parts that wait with it.

    What a part leaves of its limit, those after it share: of 100 s, shares 1, 3 and 4 give the first 12.5 s;
    if it takes 4 s of them, the second gets 3 / 7 of 96 s.

    Args:
        name: one of `waiting`.
        waiting: parts that have not run yet.
        seconds_left: for all of them.
    """
    own = next(part.share for part in waiting if part.name == name)
    return max(0.0, seconds_left) * own / sum(part.share for part in waiting)


def run_part(
    part: Part, spec: PartSpec, show: Callable[[str], None], check: Callable[[], None] | None = None
) -> PartOutcome:
    """Run a part to its end or to its limit; none of its processes is left then.

    Args:
        part: to run.
        spec: for it; its folder is made here.
        show: called with the lines that it marks.
        check: called again and again; `TimeoutError` ends the part as its limit does, and what else it
            raises comes out here.
    """
    folder = Path(spec.folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.json"
    path.write_text(spec.model_dump_json(indent=1))
    spec.figures_path.unlink(missing_ok=True)
    token, started = uuid.uuid4().hex, time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", part.module, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=part_environment(spec) | {STEP_VARIABLE: step_variable(token)},
        cwd=PROJECT_ROOT,
        start_new_session=True,
    )
    supervisor, tail = Supervisor(process, token), deque[str](maxlen=LAST_LINES)
    is_late = False
    with (folder / "log.txt").open("w", buffering=1) as log:
        try:
            for line in supervisor.lines(spec.seconds, check):
                _handle(line, log.write, tail, show)
            status = supervisor.end()
        except TimeoutError:
            is_late, status = True, supervisor.end(interrupted=True)
        except BaseException:
            supervisor.end(interrupted=True)
            raise
    seconds, figures = time.monotonic() - started, figures_of(spec)
    facts = {"name": part.name, "seconds": seconds, "limit_seconds": spec.seconds, "figures": figures}
    if is_late:
        return PartOutcome(state="late", reason="ended at its limit", last_lines=tail, **facts)
    if status:
        return PartOutcome(state="failed", reason=describe_status(status), last_lines=tail, **facts)
    skipped = figures.get("skipped", "")
    return PartOutcome(state="skipped" if skipped else "done", reason=skipped, **facts)


def part_environment(spec: PartSpec) -> dict[str, str]:
    """Environment variables of a part: the GPUs that it may use, and no multicast."""
    variables = NO_MULTICAST | dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT_ROOT), variables.get("PYTHONPATH")]))
    variables["PYTHONUNBUFFERED"] = "1"
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(spec.devices)
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables | bytecode_variables(spec.common_folder)


def bytecode_variables(folder: Path) -> dict[str, str]:
    """Let all processes share compiled modules, which spares each of them many seconds of importing vLLM.

    Args:
        folder: where they go if they are not beside vLLM's own and cannot be written there.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None or PREFIX_VARIABLE in os.environ:
        return {}
    compiled = Path(importlib.util.cache_from_source(package.origin))
    if compiled.exists() or os.access(Path(package.origin).parent, os.W_OK):
        return {}
    return {PREFIX_VARIABLE: str(folder / "bytecode")}


def serve(measure: Callable[[PartSpec], None]) -> None:
    """Be a part's process: measure what the spec on the command line says; ends with whoever started it."""
    threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    measure(PartSpec.model_validate_json(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    sys.stderr.flush()


def tell(text: str) -> None:
    """Show a line to whoever waits for this part."""
    sys.stdout.write(f"{MARK}{text}\n")
    sys.stdout.flush()


def _handle(line: str, write: Callable[[str], Any], tail: deque[str], show: Callable[[str], None]) -> None:
    text = line.rstrip()
    write(f"{text}\n")
    if text.startswith(MARK):
        show(text.removeprefix(MARK))
    if text.strip():
        tail.append(text.removeprefix(MARK))


def figures_of(spec: PartSpec) -> dict[str, Any]:
    """What a part has left so far."""
    try:
        found = json.loads(spec.figures_path.read_text())
    except (OSError, ValueError):
        return {}
    assert isinstance(found, dict), spec.figures_path
    return found
