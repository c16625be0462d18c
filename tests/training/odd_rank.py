"""A rank that does what `ODD_RANK` says: `<rank> <step> raise`, `kill` itself, `hang`, `kill_step` or `log`.

`kill_step` kills the process that started the ranks, `hang` does nothing for ten minutes, and `log` says
something at each level and goes on, and lets all ranks find steps odd. Before step 0 is before anything of
training; at a later step the rank waits for a checkpoint first. It makes `ODD_STAMP` when it does it, and
others make `<ODD_STAMP>-<rank>` when they come to that step.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from eagle3_core.step import end_process
from eagle3_core.training import loop, rank
from eagle3_core.training.health import Verdict
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
        if DEED == "log":
            loop.judge_step = lambda *_: Verdict(reason="odd to all")
        Path(f"{os.environ['ODD_STAMP']}-{os.environ['RANK']}").touch()
    return usual(self, *args)


def act(*_: Any) -> Any:
    Path(os.environ["ODD_STAMP"]).touch()
    if DEED == "raise":
        raise RuntimeError("this rank is odd")
    if DEED == "log":
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("eagle3_core.odd").log(level, "token of level %d", level)
        return
    if DEED != "hang":
        os.kill(os.getpid() if DEED == "kill" else os.getppid(), signal.SIGKILL)
    time.sleep(600)


if __name__ == "__main__":
    Trainer._step = odd  # type: ignore[method-assign]
    if os.environ["RANK"] == ODD and STEP == "0":
        rank.train_rank = act
    end_process(rank.main())
