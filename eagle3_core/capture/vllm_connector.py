"""The KV connector through which an unpatched vLLM hands over captured hidden states.

vLLM's `extract_hidden_states` method writes the states of each token into a cache group of their own. vLLM
makes this connector twice: beside the scheduler, where a finished request's block ids are noted and its
blocks kept from being freed (`RequestLog`), and in every worker, where rank 0 copies the rows out of these
blocks into the memory of their shard (`StatesWorker`).

Loaded by `kv_connector="ShardConnector", kv_connector_module_path="eagle3_core.capture.vllm_connector"`; see
`eagle3_core.capture.vllm_engine` for the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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

from eagle3_core.capture.cache_layout import required_layout_name, token_first_view
from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.request_log import FinishedRequest, RequestLog
from eagle3_core.capture.states_worker import StatesWorker
from eagle3_core.errors import CaptureError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.request import Request

JOB_KEY = "job"


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler's connector tells the worker's with each engine step."""

    finished: list[FinishedRequest] = field(default_factory=list)
    flush: list[int] | None = None


class ShardConnector(KVConnectorBase_V1, SupportsHMA):
    """Copies captured states out of vLLM's cache into shards."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._job = CaptureJob.model_validate(extra[JOB_KEY])
        self._group, self._block_size = find_states_group(kv_cache_config)
        self._requests = RequestLog(self._job.journal)
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
        """Requests that finished since the last step, and shards that must be whole by now."""
        flush = self._requests.started(scheduler_output.scheduled_new_reqs)
        return StepMetadata(self._requests.take(), flush)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note a finished request; True keeps its blocks until `get_finished` names it."""
        return self._requests.finished(request, block_ids), None

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

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before the work of a step is queued."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step()

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
        return self._worker.step(metadata.finished, metadata.flush) or None, None

    def shutdown(self) -> None:
        """End the writing thread."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


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
