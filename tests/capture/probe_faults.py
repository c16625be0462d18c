"""Runs the step `probe` with an engine whose cache blocks of two requests are exchanged.

`python -m tests.capture.probe_faults SPEC RESULT`
"""

from __future__ import annotations

import dataclasses
import sys

from eagle3_core import step
from eagle3_core.capture.request_log import FinishedRequest, RequestLog

take = RequestLog.take


def exchange_blocks(log: RequestLog) -> list[FinishedRequest]:
    """The requests that finished in one engine step, the blocks of the first two of equal size exchanged."""
    finished = take(log)
    for index, one in enumerate(finished):
        for other_index, other in enumerate(finished[:index]):
            is_pair = one.sample.startswith("request") and one.token_ids != other.token_ids
            if is_pair and len(one.block_ids) == len(other.block_ids):
                finished[index] = dataclasses.replace(one, block_ids=other.block_ids)
                finished[other_index] = dataclasses.replace(other, block_ids=one.block_ids)
                return finished
    return finished


if __name__ == "__main__":
    RequestLog.take = exchange_blocks  # type: ignore[method-assign]
    step.end_process(step.main(["probe", *sys.argv[1:]]))
