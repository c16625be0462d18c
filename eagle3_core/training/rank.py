"""One rank of a training: `python -m eagle3_core.training.rank SPEC OUTCOME`.

Which rank it is, how many there are and where they meet stands in the environment, as torchrun sets it. The
first rank prints progress and log lines and leaves the result; the others print warnings and errors. At
SIGUSR1 a rank prints what its threads are doing. It ends itself when its standard input, if that is a pipe,
closes: whoever started it is gone then.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

import torch

from eagle3_core.contracts import StepOutcome, StepSpec
from eagle3_core.errors import EXIT_BUG, EXIT_OK, Eagle3Error
from eagle3_core.step import LOG_FORMAT, Progress, end_process, end_with_parent, failure_of
from eagle3_core.store.disk import DiskGuard, guarding
from eagle3_core.store.files import write_atomic
from eagle3_core.training.ranks import join
from eagle3_core.training.train import train_rank


def main(arguments: list[str] | None = None) -> int:
    """Train as the rank that the environment names; returns the exit code."""
    spec_path, outcome_path = map(Path, arguments if arguments is not None else sys.argv[1:])
    is_first = os.environ.get("RANK", "0") == "0"
    level = logging.INFO if is_first else logging.WARNING
    logging.basicConfig(level=level, format=LOG_FORMAT, stream=sys.stdout, force=True)
    faulthandler.register(signal.SIGUSR1, file=sys.stdout)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=end_with_parent, name="parent-watch", daemon=True).start()
    started = time.monotonic()
    try:
        outcome = _trained(StepSpec.model_validate_json(spec_path.read_text()))
    except Exception as error:
        failure = failure_of(error)
        print(failure.message if failure.is_user_error else failure.traceback, flush=True)
        outcome = StepOutcome(status="failed", failure=failure, seconds=time.monotonic() - started)
    if is_first or outcome.failure is not None:  # torchrun gives all ranks the same path
        write_atomic(outcome_path, outcome.model_dump_json())
    if outcome.failure is None:
        return EXIT_OK
    return Eagle3Error.exit_code if outcome.failure.is_user_error else EXIT_BUG


def _trained(spec: StepSpec) -> StepOutcome:
    started, progress = time.monotonic(), Progress("train")
    ranks = join(torch.device(spec.config.engine.device))
    with guarding(DiskGuard(spec.config.limits, spec.run_id, progress.pause if ranks.is_first else None)):
        result = train_rank(spec, progress, ranks)
    return StepOutcome(
        status="ok",
        result=result.model_dump(mode="json") if ranks.is_first else None,
        seconds=time.monotonic() - started,
    )


if __name__ == "__main__":
    end_process(main())
