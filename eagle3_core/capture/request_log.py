"""What the scheduler's side of the connector notes of requests; imports no engine.

A request names its sample and carries nothing else. A request that asks to flush is answered only after all
states of requests that finished before it have left the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eagle3_core.capture.journal import Journal

SAMPLE_PARAMETER = "eagle3_sample"
FLUSH_PARAMETER = "eagle3_flush"


@dataclass(frozen=True)
class FinishedRequest:
    """What the worker must know of a finished request.

    `num_rows` counts the prompt rows that the engine computed in this request; tokens found in a prefix
    cache have no row.
    """

    request_id: str
    sample: str
    token_ids: list[int]
    num_rows: int
    block_ids: list[int]


class RequestLog:
    """Follows requests from their start to the step in which the worker learns that they have finished.

    Args:
        journal: is told which samples the engine begins and finishes to compute.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._finished: list[FinishedRequest] = []
        self._cached_tokens: dict[str, int] = {}

    def started(self, new_requests: Iterable[Any]) -> list[int] | None:
        """Note requests that run for the first time; returns the shards that one of them asks to flush.

        What is computed already when a request starts was found in a prefix cache.
        """
        flush: list[int] | None = None
        for new in new_requests:
            parameters = _transfer_parameters(new.sampling_params)
            flush = parameters.get(FLUSH_PARAMETER, flush)
            if SAMPLE_PARAMETER in parameters:
                self._cached_tokens[new.req_id] = new.num_computed_tokens
                self._journal.started(parameters[SAMPLE_PARAMETER])
        return flush

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """Note a finished request; returns whether its blocks must stay until the worker has copied them.

        Requests without a sample (warm-up, flush), and requests that were aborted before all of their prompt
        was computed, leave nothing behind.
        """
        sample = (request.kv_transfer_params or {}).get(SAMPLE_PARAMETER)
        cached = self._cached_tokens.pop(request.request_id, 0)
        token_ids = list(request.prompt_token_ids or ())
        if sample is not None:
            self._journal.finished(sample)
        if sample is None or not block_ids or request.num_computed_tokens < len(token_ids):
            return False
        num_rows = len(token_ids) - cached
        self._finished.append(
            FinishedRequest(request.request_id, sample, token_ids, num_rows, list(block_ids))
        )
        return True

    def take(self) -> list[FinishedRequest]:
        """Requests that finished since the last call."""
        finished, self._finished = self._finished, []
        return finished


def _transfer_parameters(sampling_params: Any) -> dict[str, Any]:
    extra = getattr(sampling_params, "extra_args", None) or {}
    return extra.get("kv_transfer_params") or {}
