"""The KV connector through which an unpatched vLLM hands over captured hidden states.

Legend: S tokens of a sample, L captured ids, H hidden size, T tokens of a cache block.

vLLM's `extract_hidden_states` method writes the states of each token into a cache group of their own. vLLM
makes this connector twice: beside the scheduler, where a finished request's block ids are noted and its
blocks kept from being freed, and in every worker, where rank 0 copies the rows out of these blocks into the
memory of their shard. A request names its sample and carries nothing else; a request that asks for `drain`
is answered only after all states of requests that finished before it are on disk.

Loaded by `kv_connector="ShardConnector", kv_connector_module_path="eagle3_core.capture.vllm_connector"`; see
`eagle3_core.capture.vllm_engine` for the driver.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, UniformTypeKVCacheSpecs

from eagle3_core.capture.assemble import ShardAssembler, fill
from eagle3_core.capture.cache_layout import required_layout_name, token_first_view
from eagle3_core.capture.job import CaptureJob
from eagle3_core.errors import CaptureError
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.files import folder_lock

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

JOB_KEY = "job"
SAMPLE_PARAMETER = "eagle3_sample"
DRAIN_PARAMETER = "eagle3_drain"


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


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler's connector tells the worker's with each engine step."""

    finished: list[FinishedRequest] = field(default_factory=list)
    drain: bool = False


class ShardConnector(KVConnectorBase_V1, SupportsHMA):
    """Copies captured states out of vLLM's cache into shards."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._job = CaptureJob.model_validate(extra[JOB_KEY])
        self._group, self._block_size = find_states_group(kv_cache_config)
        self._finished: list[FinishedRequest] = []
        self._cached_tokens: dict[str, int] = {}
        self._worker: StatesWorker | None = None

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """False: the states must not share blocks with the target's own cache (asked by vLLM up to 0.28)."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that keeps a token's states together."""
        return required_layout_name(vllm.__version__)

    def get_finished_count(self) -> int:
        """One notice a request: only rank 0 copies."""
        return 1

    # Beside the scheduler.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Requests that finished since the last step, and whether this step must wait for the disk."""
        new_requests = scheduler_output.scheduled_new_reqs
        parameters = [_parameters(new.sampling_params) for new in new_requests]
        self._cached_tokens |= {new.req_id: new.num_computed_tokens for new in new_requests}
        finished, self._finished = self._finished, []
        return StepMetadata(finished, any(p.get(DRAIN_PARAMETER) for p in parameters))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note a finished request; True keeps its blocks until `get_finished` names it.

        Requests without a sample (warm-up, drain) and requests that were aborted before all of their prompt
        was computed leave nothing behind.
        """
        sample = (request.kv_transfer_params or {}).get(SAMPLE_PARAMETER)
        cached = self._cached_tokens.pop(request.request_id, 0)
        token_ids = list(request.prompt_token_ids or ())
        if sample is None or not block_ids or request.num_computed_tokens < len(token_ids):
            return False, None
        self._finished.append(
            FinishedRequest(request.request_id, sample, token_ids, len(token_ids) - cached, list(block_ids))
        )
        return True, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, given the blocks of every cache group."""
        own = block_ids[self._group] if self._group < len(block_ids) else []
        return self.request_finished(request, own)

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the cache of captured states and check its shape; only rank 0 goes on to copy."""
        if get_tensor_model_parallel_rank() != 0:
            return
        try:
            cache = token_first_view(
                _states_cache(self._vllm_config, kv_caches),
                vllm.__version__,
                self._block_size,
                len(self._job.capture_ids),
                self._job.layout.hidden_size,
            )
            self._worker = StatesWorker(self._job, cache)
        except Exception as error:
            self._job.record_failure(error)
            raise

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do by layer: whole requests are copied when they have finished."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: blocks stay until their copy is done."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Begin copies of newly finished requests and name those whose copy is done."""
        if self._worker is None or not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return self._worker.step(metadata) or None, None

    def shutdown(self) -> None:
        """End the writing thread and free the session folder."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class StatesWorker:
    """Copies rows [S, L, H] out of the cache and passes them on to the assembler.

    Args:
        job: what is captured.
        cache: the cache of captured states as [blocks, T, L, H].

    After a failure, which is recorded for the driver, it copies nothing more but still names every request
    as finished, so that the engine does not wait for ever.
    """

    def __init__(self, job: CaptureJob, cache: torch.Tensor) -> None:
        if str(cache.dtype) != f"torch.{job.layout.dtype}":
            raise CaptureError(f"vLLM holds captured states as {cache.dtype}", expected=job.layout.dtype)
        self._job, self._cache = job, cache
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None
        self._exit = contextlib.ExitStack()
        self._exit.enter_context(folder_lock(job.session))
        samples = read_dataset(Path(job.dataset_folder))
        self._assembler = ShardAssembler(job, samples, pin_memory=cache.is_cuda)
        self._exit.callback(self._assembler.close)
        self._copies: list[tuple[FinishedRequest, torch.cuda.Event | None]] = []
        self._failed = False

    def step(self, metadata: StepMetadata) -> set[str]:
        """Handle one engine step; returns the ids of requests whose blocks may be freed."""
        try:
            if not self._failed:
                for request in metadata.finished:
                    self._copies.append((request, self._begin_copy(request)))
                done = self._confirm(wait=metadata.drain)
                if metadata.drain:
                    self._assembler.drain()
                return done
        except Exception as error:
            logger.exception("capture failed in the engine's worker")
            self._job.record_failure(error)
            self._failed = True
        done = {request.request_id for request, _ in self._copies}
        self._copies.clear()
        return done | {request.request_id for request in metadata.finished}

    def close(self) -> None:
        """End the writing thread and free the session folder."""
        self._exit.close()

    def _begin_copy(self, request: FinishedRequest) -> torch.cuda.Event | None:
        num_tokens, capacity = len(request.token_ids), len(request.block_ids) * self._cache.shape[1]
        place = self._assembler.place(request.sample, request.token_ids, min(request.num_rows, capacity))
        if self._stream is None:
            fill(place, self._rows(torch.tensor(request.block_ids), num_tokens))
            return None
        blocks = torch.tensor(request.block_ids, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            fill(place, self._rows(blocks.to(self._cache.device, non_blocking=True), num_tokens))
            return self._stream.record_event()

    def _rows(self, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return self._cache[blocks].flatten(0, 1)[:num_tokens]

    def _confirm(self, wait: bool) -> set[str]:
        done: set[str] = set()
        waiting = []
        for request, event in self._copies:
            if event is not None and wait:
                event.synchronize()
            if event is None or event.query():
                self._assembler.filled(request.sample)
                done.add(request.request_id)
            else:
                waiting.append((request, event))
        self._copies = waiting
        return done


def find_states_group(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Index and block size of the cache group whose block table places captured states.

    A group of many layers may hold the states too, each layer in memory of its own. The scheduler sees such
    a group under the spec of one of its layers, so there the only group is taken; the worker checks the
    shape of the cache itself.

    Raises:
        CaptureError: no such group, several, or several layers of captured states.
    """
    groups = kv_cache_config.kv_cache_groups
    states = [
        (index, name)
        for index, group in enumerate(groups)
        for name, spec in _layer_specs(group)
        if isinstance(spec, HiddenStateCacheSpec)
    ]
    if not states and len(groups) == 1:
        return 0, groups[0].kv_cache_spec.block_size
    if len(states) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise CaptureError(
            f"vLLM caches captured states in {len(states)} layers, in {len(groups)} groups ({kinds})",
            expected="exactly one layer that is told by its type",
            remedy="this target cannot be captured with this vLLM release: set capture.engine to reference",
        )
    index = states[0][0]
    return index, groups[index].kv_cache_spec.block_size


def _layer_specs(group: KVCacheGroupSpec) -> Iterable[tuple[str, KVCacheSpec]]:
    if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return group.kv_cache_spec.kv_cache_specs.items()
    return [(name, group.kv_cache_spec) for name in group.layer_names]


def _states_cache(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> torch.Tensor:
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

    layers = get_layers_from_vllm_config(vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
    if len(layers) != 1:
        raise CaptureError(f"vLLM registered {len(layers)} caches of captured states", expected="one")
    return kv_caches[next(iter(layers))]


def _parameters(sampling_params: Any) -> dict[str, Any]:
    extra = getattr(sampling_params, "extra_args", None) or {}
    return extra.get("kv_transfer_params") or {}
