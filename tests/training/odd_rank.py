"""A rank that does what `ODD_RANK` says: `<rank> <step> raise`, `kill` itself, `hang` or `kill_step`.

`kill_step` kills the process that started the ranks, and `hang` does nothing for ten minutes. Before step 0
is before anything of training; at a later step the rank waits for a checkpoint first. It makes `ODD_STAMP`
when it does it, and others make `<ODD_STAMP>-<rank>` when they come to that step.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from eagle3_core.step import end_process
from eagle3_core.training import rank
from eagle3_core.training.loop import Trainer

ODD, STEP, DEED = os.environ["ODD_RANK"].split()
usual = Trainer._step


def odd(self: Trainer, *args: Any) -> float:
    pointer = self.resume._folder / "resume.json"
    while self.position.step and not pointer.is_file():
        time.sleep(0.01)
    if self.position.step + 1 == int(STEP):
        if os.environ["RANK"] == ODD:
            act()
        Path(f"{os.environ['ODD_STAMP']}-{os.environ['RANK']}").touch()
    return usual(self, *args)


def act(*_: Any) -> Any:
    Path(os.environ["ODD_STAMP"]).touch()
    if DEED == "raise":
        raise RuntimeError("this rank is odd")
    if DEED != "hang":
        os.kill(os.getpid() if DEED == "kill" else os.getppid(), signal.SIGKILL)
    time.sleep(600)


if __name__ == "__main__":
    Trainer._step = odd  # type: ignore[method-assign]
    if os.environ["RANK"] == ODD and STEP == "0":
        rank.train_rank = act
    end_process(rank.main())
