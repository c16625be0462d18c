"""The export step: a folder per serving engine, written from the checkpoint and read back.

A format is a module with a writer and a check; `FORMATS` names them by engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.contracts import ExportResult, StepSpec
from eagle3_core.errors import ExportError
from eagle3_core.serving.draft import AUX_IDS_KEY, TrainedDraft, read_draft
from eagle3_core.serving.vllm_format import check_vllm, write_vllm
from eagle3_core.step import Progress
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.layers import resolve_aux_layer_ids
from eagle3_core.target.locate import verifier_name

logger = logging.getLogger(__name__)


class WriteFormat(Protocol):
    """Writes an engine's folder and returns its files."""

    def __call__(
        self,
        folder: Path,
        draft: TrainedDraft,
        target: TargetInfo,
        *,
        verifier: str,
        num_speculative_tokens: int,
        include_embedding: bool,
    ) -> list[Path]: ...


@dataclass(frozen=True)
class ExportFormat:
    """How to write an engine's folder, and how to check that it is what the engine needs."""

    write: WriteFormat
    check: Callable[..., None]


FORMATS = {"vllm": ExportFormat(write_vllm, check_vllm)}


def run(spec: StepSpec, progress: Progress) -> ExportResult:
    """Export the checkpoint `spec.inputs["checkpoint"]` for every engine of `export.engines`.

    Raises:
        ExportError: the checkpoint does not fit the target or the run, or what was written is not what an
            engine would need.
        StoreError: an input is missing, or the export is being written by another process.
    """
    started = time.monotonic()
    config, store = spec.config, open_store(spec.config)
    target = inspect_target(Path(spec.target_path))
    draft = _read_inputs(store, spec)
    aux_layer_ids = resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers)
    if tuple(draft.config[AUX_IDS_KEY]) != aux_layer_ids:
        raise ExportError(
            f"the checkpoint was trained on the auxiliary layer ids {draft.config[AUX_IDS_KEY]}",
            expected=f"{list(aux_layer_ids)}, those of this run",
        )
    embedding = {"include_embedding": config.export.include_embedding}
    files: list[Path] = []
    with store.writer(spec.outputs["export"], spec.run_id) as writer:
        if writer.is_complete:
            return ExportResult.model_validate(writer.facts["result"])
        for index, engine in enumerate(config.export.engines):
            folder = writer.folder / engine
            files += FORMATS[engine].write(
                folder,
                draft,
                target,
                verifier=verifier_name(config, spec.target_path),
                num_speculative_tokens=config.benchmark.num_speculative_tokens,
                **embedding,
            )
            FORMATS[engine].check(folder, draft, target, aux_layer_ids=aux_layer_ids, **embedding)
            logger.info("exported and checked %s", folder)
            progress(index + 1, len(config.export.engines), "engines", engine)
        result = ExportResult(
            path=str(writer.folder),
            bytes=sum(file.stat().st_size for file in files),
            engines=list(config.export.engines),
        )
        writer.complete(files, seconds=time.monotonic() - started, result=result.model_dump(mode="json"))
    return result


def _read_inputs(store: LocalStore, spec: StepSpec) -> TrainedDraft:
    checkpoint = spec.inputs["checkpoint"]
    vocabulary = store.read(checkpoint).parents.get("vocabulary")
    if vocabulary is None:
        raise ExportError(f"{checkpoint} names no vocabulary it was trained with", remedy="train it again")
    for ref in (checkpoint, vocabulary):
        _check_intact(store, ref)
    return read_draft(store.fetch(checkpoint), store.fetch(vocabulary))


def _check_intact(store: LocalStore, ref: ArtifactRef) -> None:
    problems = store.problems(store.read(ref))
    if problems:
        raise ExportError(
            f"{ref} is damaged: {'; '.join(problems.values())}", remedy="run the stage that makes it again"
        )
