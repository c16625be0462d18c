"""Hidden states from a plain transformers forward: slow, exact, and the measure for the other engines.

Legend: B sequences, S tokens, L wanted capture ids, H hidden size, V vocabulary, N decoder layers.

Hooks read the input of decoder layer k for a capture id k < N, and the output of the last layer for id N. The
last entry of transformers' own `hidden_states` is not that: it has been through the final norm.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.assemble import ShardAssembler
from eagle3_core.capture.compare import relative_errors
from eagle3_core.capture.feed import OnTokens, Take
from eagle3_core.capture.job import CaptureJob, iter_take, wait_take
from eagle3_core.capture.reference_batch import (
    Batch,
    Batching,
    can_make_masks,
    check_batching,
    make_batch,
    packed_masks,
    plan_batches,
)
from eagle3_core.capture.reference_load import find_decoder_layers, load_reference
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import PlannedShard
from eagle3_core.target.info import TargetInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAME_STATES = 0.1
"""Relative error of a row below which it is the same state: rounding gives 0.02, foreign tokens 0.3."""

logger = logging.getLogger(__name__)


class ReferenceModel:
    """A target in transformers, with hooks on its decoder layers.

    Args:
        info: the target.
        dtype: compute dtype, e.g. `bfloat16`.
        device: `cpu` or `cuda`.
        trust_remote_code: let transformers run code of the target.

    Raises:
        HostError: the device has too little memory.
        TargetError: transformers cannot load it, or its decoder layers cannot be told.
    """

    def __init__(
        self, info: TargetInfo, dtype: str, device: str = "cpu", trust_remote_code: bool = False
    ) -> None:
        started = time.monotonic()
        self.info = info
        self.num_layers = info.num_layers
        self.device = torch.device(device)
        self._model: PreTrainedModel = load_reference(info, dtype, self.device, trust_remote_code)
        self._layers = find_decoder_layers(self._model, info.num_layers, info.hidden_size)
        self._gives_masks: bool | None = None
        logger.info("loaded %s in transformers in %.1f s", info.path, time.monotonic() - started)

    def forward(
        self, input_ids: torch.Tensor, capture_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [S, L, H] by capture id and logits [S, V] of one sequence of ids [S]; L may be 0."""
        return self.forward_batch([input_ids], capture_ids, "single")[0]

    def forward_batch(
        self, sequences: Sequence[torch.Tensor], capture_ids: Sequence[int], batching: Batching
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each of several sequences of ids [S] what `forward` returns, from one pass.

        Raises:
            CaptureError: this target's results would depend on the batch.
        """
        check_batching(self.info, batching)
        if batching == "packed" and self._gives_masks is None:
            self._gives_masks = self._find_packing()
        return self._forward_batch(make_batch(sequences, batching), capture_ids, bool(self._gives_masks))

    def _forward_batch(
        self, batch: Batch, capture_ids: Sequence[int], gives_masks: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        inputs: dict[str, Any] = {name: tensor.to(self.device) for name, tensor in batch.inputs().items()}
        if gives_masks and batch.position_ids is not None:
            inputs["attention_mask"] = packed_masks(self._model, **inputs)
        states, logits = self._run(inputs, capture_ids)
        found = []
        for row, tokens in batch.places:
            own = [state[row, tokens] for state in states]
            own_logits = logits[row, tokens]
            stacked = torch.stack(own, dim=1) if own else own_logits.new_empty(len(own_logits), 0, 0)
            found.append((stacked, own_logits))
        return found

    @torch.inference_mode()
    def _run(
        self, inputs: dict[str, Any], capture_ids: Sequence[int]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """States [B, S, H] by capture id, and logits [B, S, V]."""
        caught: dict[int, torch.Tensor] = {}
        hooks = [self._hook(k, caught) for k in capture_ids]
        try:
            output = self._model(**inputs, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        missing = [k for k in capture_ids if k not in caught]
        if missing:
            raise CaptureError(f"the reference forward did not pass the layers of capture ids {missing}")
        return [caught[k] for k in capture_ids], output.logits

    def _find_packing(self) -> bool:
        """Whether this model keeps packed sequences apart only with masks given to it, found by trying.

        Raises:
            CaptureError: not even so.
        """
        sequences = [torch.arange(start, start + 6) % self.info.vocab_size for start in (3, 11)]
        alone = self.forward(sequences[1], (self.num_layers,))[0]
        for gives_masks in (False, True) if can_make_masks(self._model) else (False,):
            packed = make_batch(sequences, "packed")
            states = self._forward_batch(packed, (self.num_layers,), gives_masks)[1][0]
            if bool((relative_errors(states, alone) < SAME_STATES).all()):
                return gives_masks
        raise CaptureError(
            f"{type(self._model).__name__} of transformers does not keep packed sequences apart",
            remedy="set capture.reference_batching to padded or single",
        )

    def all_states(self, input_ids: torch.Tensor) -> torch.Tensor:
        """States [S, N + 1, H] of all capture ids, 0 to N."""
        return self.forward(input_ids, range(self.num_layers + 1))[0]

    def _hook(self, capture_id: int, caught: dict[int, torch.Tensor]) -> torch.utils.hooks.RemovableHandle:
        def keep_input(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            caught[capture_id] = (arguments[0] if arguments else named["hidden_states"]).clone()

        def keep_output(_: torch.nn.Module, __: Any, output: Any) -> None:
            caught[capture_id] = (output if isinstance(output, torch.Tensor) else output[0]).clone()

        if capture_id == self.num_layers:
            return self._layers[-1].register_forward_hook(keep_output)
        return self._layers[capture_id].register_forward_pre_hook(keep_input, with_kwargs=True)


def capture_with_reference(
    config: RunConfig,
    info: TargetInfo,
    job: CaptureJob,
    samples: Sequence[Sample],
    on_tokens: OnTokens,
    take: Take | None = None,
) -> Iterator[tuple[PlannedShard, FileEntry]]:
    """Capture the job's shards with transformers and yield each when it is written.

    Same interface as `eagle3_core.capture.vllm_engine.capture_with_vllm`.
    """
    batching = config.capture.reference_batching
    check_batching(info, batching)
    model = ReferenceModel(info, job.layout.dtype, config.engine.device, config.target.trust_remote_code)
    on_tokens(0)
    assembler, journal = ShardAssembler(job, samples), job.journal
    take = wait_take(take or iter_take(job.shards))
    try:
        while (shard := take()) is not None:
            for batch in _batches(config, job, job.samples_of(shard, samples)):
                for sample in batch:
                    journal.started(sample.key)
                sequences = [torch.from_numpy(sample.input_ids) for sample in batch]
                found = model.forward_batch(sequences, job.capture_ids, batching)
                for sample, (states, _) in zip(batch, found, strict=True):
                    journal.finished(sample.key)
                    assembler.add(sample.key, sample.input_ids.tolist(), states.cpu())
                on_tokens(sum(map(len, batch)))
            assembler.drain()
            entry = job.finished_entry(shard)
            assert entry is not None
            yield shard, entry
    finally:
        assembler.close()


def _batches(config: RunConfig, job: CaptureJob, wanted: Sequence[Sample]) -> Iterator[list[Sample]]:
    """A shard's samples by forward: first each of those that the job wants alone, then the others."""
    yield from ([sample] for sample in wanted if sample.key in job.alone)
    others = [sample for sample in wanted if sample.key not in job.alone]
    lengths = [len(sample) for sample in others]
    capture = config.capture
    for batch in plan_batches(lengths, capture.max_batched_tokens, capture.reference_batching):
        yield [others[index] for index in batch]
