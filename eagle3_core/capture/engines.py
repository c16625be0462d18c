"""The engines that capture hidden states, behind one interface: samples in, finished shards out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.feed import OnTokens, Take
from eagle3_core.capture.job import CaptureJob
from eagle3_core.config import RunConfig
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import PlannedShard
from eagle3_core.target.info import TargetInfo


class CaptureEngine(Protocol):
    """Loads an engine, captures the shards that `take` gives and yields each when it is written.

    A written shard lies in `job.folder`, with its manifest entry beside it. `on_tokens` is called with 0 when
    the engine is loaded and then with numbers of newly captured tokens; `take` returns None when no shard is
    left, and gives the job's shards in order where it is not named.
    """

    def __call__(
        self,
        config: RunConfig,
        info: TargetInfo,
        job: CaptureJob,
        samples: Sequence[Sample],
        on_tokens: OnTokens,
        take: Take | None = None,
    ) -> Iterator[tuple[PlannedShard, FileEntry]]: ...


def capture_engine(name: str) -> CaptureEngine:
    """The engine of that name (`capture.engine`); only its own modules are imported."""
    if name == "vllm":
        from eagle3_core.capture.vllm_engine import capture_with_vllm

        return capture_with_vllm
    if name == "sglang":
        from eagle3_core.capture.sglang_engine import capture_with_sglang

        return capture_with_sglang
    assert name == "reference", name
    from eagle3_core.capture.reference import capture_with_reference

    return capture_with_reference
