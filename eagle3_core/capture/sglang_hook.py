"""Hooks that read hidden states inside SGLang's scheduler process, attached through its `forward_hooks`.

SGLang imports this module in every scheduler process and calls the factories with the specs' `config`. It
imports nothing of SGLang. Hooks only keep tensors and hand a whole batch to `StatesWriter`: they never wait
for the GPU. A failure is recorded for the driver and ends the capture, not the engine.

Legend: T rows of a batch, H hidden size.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.sglang_batch import is_check, split_batch
from eagle3_core.capture.sglang_plan import READY_NAME, Variant, state_targets
from eagle3_core.capture.sglang_writer import CapturedBatch, StatesWriter
from eagle3_core.errors import CaptureError
from eagle3_core.store.files import write_atomic

logger = logging.getLogger(__name__)

Hook = Callable[[torch.nn.Module, tuple[Any, ...], Any], Any]
PARTIAL_SUM = "_sglang_needs_allreduce_fusion"


class StatesCollector:
    """What the hooks of one scheduler process share: the states of the batch that is being computed."""

    def __init__(self, job: CaptureJob, variant: Variant, is_silent: bool = False) -> None:
        self.job, self.variant = job, variant
        self._is_silent = is_silent
        self.is_failed = False
        self.is_capturing_itself = False
        self._states: dict[int, torch.Tensor] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        self._writer: StatesWriter | None = None

    def keep(self, capture_id: int, module: torch.nn.Module, state: torch.Tensor) -> None:
        """Keep a state [T, H] of this batch; nobody else may write to it.

        Raises:
            CaptureError: another module gave a state of this id.
        """
        if self._is_silent:
            return
        if self._modules.setdefault(capture_id, module) is not module:
            raise CaptureError(
                f"two modules of the target match the hook of capture id {capture_id}",
                remedy="this target cannot be captured with SGLang: set capture.engine to vllm or reference",
            )
        self._states[capture_id] = state

    def end_batch(self, input_ids: torch.Tensor, batch: Any) -> None:
        """Hand over the states of a batch that is computed; decode steps and foreign batches are dropped."""
        states, self._states = self._states, {}
        if batch.forward_mode.is_decode_or_idle() or not batch.forward_mode.is_extend() or not batch.rids:
            return
        if is_check(batch.rids):
            self._check(states)
        parts = split_batch(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu)
        if not parts:
            return
        ordered = self._ordered(states, parts[-1].start + parts[-1].num_rows, len(input_ids))
        if self._writer is None:
            self._writer = StatesWriter(self.job, ordered[0].device)
        self._writer.put(CapturedBatch.begin(parts, input_ids.clone(), ordered))

    def fail(self, error: Exception) -> None:
        """Record why the capture cannot go on; the engine goes on without it."""
        logger.error("capture failed in SGLang's scheduler", exc_info=error)
        self.is_failed = True
        self._states = {}
        self.job.record_failure(error)

    def _check(self, states: dict[int, torch.Tensor]) -> None:
        missing = [k for k in self.job.capture_ids if k not in states]
        if not missing:
            write_atomic(Path(self.job.folder) / READY_NAME, "{}")
        elif self.variant != "model" or self.job.layout.final_layer_id in missing:
            targets = state_targets(missing[0], self.variant)
            raise CaptureError(
                f"no module gave SGLang's hooks the states of capture ids {missing}",
                expected=f"one of the modules {', '.join(targets)}, called in each forward pass",
                remedy="set capture.sglang_hooks to the other way, or capture.engine to vllm or reference",
            )

    def _ordered(self, states: dict[int, torch.Tensor], rows: int, ids: int) -> list[torch.Tensor]:
        """States by capture id, checked."""
        layout = self.job.layout
        missing = [k for k in self.job.capture_ids if k not in states]
        if missing:
            raise CaptureError(f"a batch came without the states of capture ids {missing}")
        ordered = [states[k] for k in self.job.capture_ids]
        for capture_id, state in zip(self.job.capture_ids, ordered, strict=True):
            if len(state) < rows or ids < rows or state.shape[1:] != (layout.hidden_size,):
                raise CaptureError(
                    f"the state of capture id {capture_id} has shape {tuple(state.shape)} for {ids} tokens",
                    expected=f"at least {rows} rows of {layout.hidden_size}",
                )
            if str(state.dtype) != f"torch.{layout.dtype}":
                raise CaptureError(
                    f"SGLang holds the state of capture id {capture_id} as {state.dtype}",
                    expected=layout.dtype,
                )
        return ordered


def make_state_hook(config: dict[str, Any]) -> Hook | None:
    """SGLang's factory of the hook on a layer (or the embedding) whose output is a state."""

    def read(collector: StatesCollector, module: torch.nn.Module, _: Any, output: Any) -> None:
        collector.keep(config["capture_id"], module, residual_sum(output))

    return _guarded(config, read)


def make_final_hook(config: dict[str, Any]) -> Hook | None:
    """SGLang's factory of the hook on the last norm, which adds up the final state before it norms it."""

    def read(collector: StatesCollector, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        collector.keep(config["capture_id"], module, output[1] if isinstance(output, tuple) else inputs[0])

    return _guarded(config, read)


def make_model_hook(config: dict[str, Any]) -> Hook | None:
    """SGLang's factory of the hook on the model around the layers: switches its own capture on."""

    def read(collector: StatesCollector, module: torch.nn.Module, _: Any, output: Any) -> Any:
        if not hasattr(module, "layers"):
            return None
        wanted = list(collector.job.layout.aux_layer_ids)
        if not collector.is_capturing_itself:
            if not hasattr(module, "layers_to_capture"):
                raise CaptureError(
                    f"SGLang's {type(module).__name__} cannot capture its own states",
                    remedy="set capture.sglang_hooks to layers, or capture.engine to vllm or reference",
                )
            module.layers_to_capture = wanted  # type: ignore[assignment]
            collector.is_capturing_itself = True
            return None
        if not isinstance(output, tuple) or len(output) != 2 or len(output[1]) != len(wanted):
            raise CaptureError(
                f"SGLang's {type(module).__name__} returned {_describe(output)}",
                expected=f"its hidden states and {len(wanted)} captured ones",
            )
        for capture_id, state in zip(wanted, output[1], strict=True):
            collector.keep(capture_id, module, state)
        return output[0]

    return _guarded(config, read, fallback=_without_captured)


def make_batch_hook(config: dict[str, Any]) -> Hook | None:
    """SGLang's factory of the hook on the logits processor, which is called last and gets the batch."""

    def read(collector: StatesCollector, _: torch.nn.Module, inputs: tuple[Any, ...], __: Any) -> None:
        batches = [argument for argument in inputs if hasattr(argument, "forward_mode")]
        # A multimodal wrapper embeds the ids itself and passes none on; the batch keeps them.
        ids = batches[0].input_ids if len(batches) == 1 and inputs[0] is None else inputs[0]
        if len(batches) != 1 or not isinstance(ids, torch.Tensor):
            raise CaptureError(
                f"SGLang calls its logits processor with {_describe(inputs)}",
                expected="the ids first, or none, and one batch that has them",
                remedy="this SGLang release is not supported",
            )
        collector.end_batch(ids, batches[0])

    return _guarded(config, read)


def residual_sum(output: Any) -> torch.Tensor:
    """The state in a layer's output: hidden + residual, or hidden alone; always a tensor of its own.

    Raises:
        CaptureError: the output has another form, or is the partial sum of one GPU.
    """
    values = output if isinstance(output, tuple | list) else (output,)
    hidden = values[0] if len(values) else None
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 2:
        raise CaptureError(
            f"a layer of the target returns {_describe(output)}",
            expected="hidden states, or hidden states and residual",
            remedy="set capture.sglang_hooks to model, or capture.engine to vllm or reference",
        )
    if getattr(hidden, PARTIAL_SUM, False):
        raise CaptureError(
            "a layer of the target returned partial sums",
            remedy="start SGLang with enforce_disable_flashinfer_allreduce_fusion",
        )
    residual = values[1] if len(values) > 1 else None
    if residual is None:
        return hidden.clone()
    if not isinstance(residual, torch.Tensor) or residual.shape != hidden.shape:
        raise CaptureError(
            f"a layer of the target returns {_describe(output)}",
            expected="hidden states and residual of one shape",
            remedy="set capture.sglang_hooks to model, or capture.engine to vllm or reference",
        )
    return hidden + residual


_collectors: dict[str, StatesCollector] = {}


def _guarded(
    config: dict[str, Any], read: Callable[..., Any], fallback: Callable[[Any], Any] | None = None
) -> Hook | None:
    """A hook that calls `read` until the capture fails.

    Args:
        config: of the hook's spec.
        read: gets collector, module, inputs and output; what it returns replaces the output.
        fallback: what replaces the output once the capture has failed. Such a hook runs on all ranks; any
            other is None on those that write nothing.
    """
    is_silent = not _is_writing_rank()
    if is_silent and fallback is None:
        return None
    path = config["job"]
    if path not in _collectors:
        job = CaptureJob.model_validate_json(Path(path).read_text())
        _collectors[path] = StatesCollector(job, config["variant"], is_silent)
    collector = _collectors[path]

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not collector.is_failed:
            try:
                with torch.no_grad():
                    return read(collector, module, inputs, output)
            except Exception as error:
                collector.fail(error)
        return fallback(output) if fallback else None

    return hook


def _without_captured(output: Any) -> Any:
    """A model's own output, without captured states; None leaves it as it is."""
    is_pair = isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], list)
    return output[0] if is_pair else None


def _is_writing_rank() -> bool:
    """Whether this is the first rank of the attention group, as SGLang says; True without SGLang."""
    context = sys.modules.get("sglang.srt.runtime_context")
    return context is None or context.get_parallel().attn_tp_rank == 0


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_describe(part) for part in value)})"
    return f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
