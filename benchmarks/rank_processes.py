"""Starts a benchmark's module on several ranks by torchrun, and lets the first of them leave a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.step import end_process

if TYPE_CHECKING:
    from eagle3_core.training.ranks import Ranks

RESULT = "EAGLE3_BENCHMARK_RESULT"


def run_ranks(module: str, count: int, arguments: Sequence[str]) -> Any:
    """Run so many ranks of `python -m module` with these arguments; returns what the first one left.

    Raises:
        CalledProcessError: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="eagle3-ranks-") as folder:
        result = Path(folder) / "result.json"
        variables = {
            RESULT: str(result),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": os.environ.get(
                "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count))
            ),
        }
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", module]
        subprocess.run(
            [sys.executable, *command, *arguments],
            env=os.environ | variables,
            cwd=PROJECT_ROOT,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(result.read_text())


def is_rank() -> bool:
    """Whether `run_ranks` has started this process."""
    return RESULT in os.environ


def join_ranks(device: str) -> Ranks:
    """Join the other ranks, on the GPU of this rank's number where `device` is `cuda`."""
    import torch

    from eagle3_core.training.ranks import join

    if device != "cuda":
        return join(torch.device("cpu"))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return join(torch.device("cuda", torch.cuda.current_device()))


def settle(ranks: Ranks) -> None:
    """Wait until this rank's device has done its work, and until all ranks are here."""
    import torch

    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    ranks.total([0.0])


def leave(result: Any, ranks: Ranks) -> NoReturn:
    """Leave what was measured, on the first rank, and end this process, when all ranks are here."""
    if ranks.is_first:
        Path(os.environ[RESULT]).write_text(json.dumps(result))
    ranks.wait()
    end_process(0)
