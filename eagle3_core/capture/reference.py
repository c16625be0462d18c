"""Hidden states from a plain transformers forward: slow, exact, and the measure for the other engines.

Legend: S tokens, L wanted capture ids, H hidden size, V vocabulary, N decoder layers.

Hooks read the input of decoder layer k for a capture id k < N, and the output of the last layer for id N. The
last entry of transformers' own `hidden_states` is not that: it has been through the final norm.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.assemble import ShardAssembler
from eagle3_core.capture.job import CaptureJob, iter_take
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError, TargetError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import PlannedShard
from eagle3_core.target.info import TargetInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class ReferenceModel:
    """A target in transformers, with hooks on its decoder layers.

    Args:
        info: the target.
        dtype: compute dtype, e.g. `bfloat16`.
        device: `cpu` or `cuda`.
        trust_remote_code: let transformers run code of the target.

    Raises:
        TargetError: transformers cannot load it, or its decoder layers cannot be told.
    """

    def __init__(
        self, info: TargetInfo, dtype: str, device: str = "cpu", trust_remote_code: bool = False
    ) -> None:
        from transformers import AutoModelForCausalLM

        started = time.monotonic()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                info.path, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, ImportError) as error:
            raise TargetError(f"transformers cannot load {info.path} ({error})") from error
        self.num_layers = info.num_layers
        self.device = torch.device(device)
        self._model: PreTrainedModel = model.eval().to(self.device)
        self._layers = find_decoder_layers(self._model, info.num_layers)
        logger.info("loaded %s in transformers in %.1f s", info.path, time.monotonic() - started)

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, capture_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """States [S, L, H] by capture id and logits [S, V] of one sequence of ids [S]; L may be 0."""
        caught: dict[int, torch.Tensor] = {}
        hooks = [self._hook(k, caught) for k in capture_ids]
        try:
            output = self._model(input_ids=input_ids.long().to(self.device)[None], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        missing = [k for k in capture_ids if k not in caught]
        if missing:
            raise CaptureError(f"the reference forward did not pass the layers of capture ids {missing}")
        logits = output.logits[0]
        states = [caught[k] for k in capture_ids]
        return torch.stack(states, dim=1) if states else logits.new_empty(len(logits), 0, 0), logits

    def all_states(self, input_ids: torch.Tensor) -> torch.Tensor:
        """States [S, N + 1, H] of all capture ids, 0 to N."""
        return self.forward(input_ids, range(self.num_layers + 1))[0]

    def _hook(self, capture_id: int, caught: dict[int, torch.Tensor]) -> torch.utils.hooks.RemovableHandle:
        def keep_input(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            caught[capture_id] = (arguments[0] if arguments else named["hidden_states"])[0].clone()

        def keep_output(_: torch.nn.Module, __: Any, output: Any) -> None:
            caught[capture_id] = (output if isinstance(output, torch.Tensor) else output[0])[0].clone()

        if capture_id == self.num_layers:
            return self._layers[-1].register_forward_hook(keep_output)
        return self._layers[capture_id].register_forward_pre_hook(keep_input, with_kwargs=True)


def find_decoder_layers(model: torch.nn.Module, num_layers: int) -> torch.nn.ModuleList:
    """The list of the language model's decoder layers.

    Raises:
        TargetError: no list `layers` of that length, or several.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and name.split(".")[-1] == "layers"
        and len(module) == num_layers
        and "vision" not in name
    }
    if len(found) != 1:
        raise TargetError(
            f"{type(model).__name__} has {len(found)} lists of {num_layers} layers ({', '.join(found)})",
            expected="one list of decoder layers",
        )
    return next(iter(found.values()))


def capture_with_reference(
    config: RunConfig,
    info: TargetInfo,
    job: CaptureJob,
    samples: Sequence[Sample],
    on_tokens: Callable[[int], None],
    take: Callable[[], PlannedShard | None] | None = None,
) -> Iterator[tuple[PlannedShard, FileEntry]]:
    """Capture the job's shards with transformers and yield each when it is written.

    Same interface as `eagle3_core.capture.vllm_engine.capture_with_vllm`.
    """
    model = ReferenceModel(info, job.layout.dtype, config.engine.device, config.target.trust_remote_code)
    on_tokens(0)
    assembler, journal = ShardAssembler(job, samples), job.journal
    take = take or iter_take(job.shards)
    try:
        while (shard := take()) is not None:
            for sample in job.samples_of(shard, samples):
                journal.started(sample.key)
                states, _ = model.forward(torch.from_numpy(sample.input_ids), job.capture_ids)
                journal.finished(sample.key)
                assembler.add(sample.key, sample.input_ids.tolist(), states.cpu())
                on_tokens(len(sample))
            assembler.drain()
            entry = job.finished_entry(shard)
            assert entry is not None
            yield shard, entry
    finally:
        assembler.close()
