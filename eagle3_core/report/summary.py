"""Makes the summary of a run from its folder and from the manifests of the artifacts that its stages name.

A run that failed half way has a summary too: figures that do not exist yet are null.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from eagle3_core.artifacts import ArtifactKind, ArtifactRef, Manifest, installed_versions
from eagle3_core.contracts import (
    AcceptanceFigures,
    BenchmarkResult,
    ExtractResult,
    PrepareResult,
    TrainResult,
    VerifyResult,
)
from eagle3_core.errors import StoreError
from eagle3_core.host.run_folder import RunFolder, RunRecord, RunState
from eagle3_core.lineage import sources
from eagle3_core.report.model import (
    AgreementSummary,
    ArtifactSummary,
    BenchmarkSummary,
    CaptureSummary,
    RunSummary,
    TrainingSummary,
    VersionSummary,
)
from eagle3_core.store.local import LocalStore

Result = TypeVar("Result", bound=BaseModel)


def summarise(run_folder: Path, store: LocalStore) -> RunSummary:
    """Everything that is known about a run now.

    Raises:
        HostError: the run folder has no readable configuration or record.
    """
    folder = RunFolder(run_folder)
    record, config = folder.record(), folder.config()
    named = [ref for stage in record.stages for ref in stage.artifacts]
    manifests, problems = _with_ancestors(store, named)
    results = _Results(manifests, named, problems)
    train = results.read("checkpoint", TrainResult)
    benchmark = results.read("benchmark", BenchmarkResult)
    return RunSummary(
        run_id=record.run_id,
        profile=config.name,
        state=_state(record),
        message=record.message,
        is_rehearsal=config.limit is not None,
        created_at=record.created_at.isoformat(timespec="seconds"),
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(sum(stage.seconds or 0.0 for stage in record.stages), 3),
        git_commit=record.git_commit,
        stages=record.stages,
        prepare=results.read("vocabulary", PrepareResult),
        capture=_capture(results.read("capture", ExtractResult)),
        verification=results.read("verification", VerifyResult),
        training=_training(train),
        benchmark=_benchmark(benchmark),
        agreement=_agreement(train, benchmark),
        artifacts=tuple(_artifact(manifest) for manifest in manifests),
        versions=_versions(manifests),
        problems=tuple(problems),
    )


def acceptance_agreement(replay: AcceptanceFigures, engine: AcceptanceFigures) -> AgreementSummary:
    """Compare the trainer's and the engine's figures for the same prompts and the same K."""
    accepted = engine.acceptance_length - 1
    return AgreementSummary(
        accepted_ratio=(replay.acceptance_length - 1) / accepted if accepted > 0 else None,
        first_position_difference=replay.per_position[0] - engine.per_position[0],
    )


class _Results:
    """The step results that the artifacts of a run carry.

    The lineage may hold two artifacts of one kind; the one that a stage of this run names is the run's.
    """

    def __init__(self, manifests: list[Manifest], named: Iterable[ArtifactRef], problems: list[str]) -> None:
        by_ref = {manifest.ref: manifest for manifest in manifests}
        self._by_kind: dict[ArtifactKind, Manifest] = {manifest.ref.kind: manifest for manifest in manifests}
        self._by_kind |= {ref.kind: by_ref[ref] for ref in named if ref in by_ref}
        self._problems = problems

    def read(self, kind: ArtifactKind, model: type[Result]) -> Result | None:
        """The result in the artifact of this kind; None, and a problem noted, where it cannot be read."""
        manifest = self._by_kind.get(kind)
        if manifest is None or manifest.state != "complete":
            return None
        try:
            return model.model_validate(manifest.facts["result"])
        except (KeyError, ValidationError) as error:
            reason = " ".join(str(error).split())
            self._problems.append(f"{manifest.ref} carries no readable result ({reason})")
            return None


def _with_ancestors(store: LocalStore, refs: Iterable[ArtifactRef]) -> tuple[list[Manifest], list[str]]:
    """Manifests of artifacts and of all that they were made from, ancestors first, and what is unreadable."""
    ordered: list[Manifest] = []
    visited: set[ArtifactRef] = set()
    problems: list[str] = []

    def visit(ref: ArtifactRef) -> None:
        if ref in visited:
            return
        visited.add(ref)
        try:
            manifest = store.find(ref)
        except StoreError as error:
            problems.append(str(error))
            return
        if manifest is None:
            problems.append(f"{ref} is not in {store.place}")
            return
        for parent in manifest.parents.values():
            visit(parent)
        ordered.append(manifest)

    for ref in refs:
        visit(ref)
    return ordered, problems


def _state(record: RunRecord) -> RunState:
    """The run's state; while the last stage, the report, is being written, that of the others."""
    others = [stage.state for stage in record.stages if stage.stage != "report"]
    if record.state == "running" and all(state == "completed" for state in others):
        return "completed"
    return record.state


def _capture(result: ExtractResult | None) -> CaptureSummary | None:
    if result is None:
        return None
    return CaptureSummary(
        tokens=result.num_tokens,
        bytes=result.bytes,
        tokens_per_second=result.tokens_per_second,
        num_shards=result.num_shards,
        num_samples=result.num_samples,
    )


def _training(result: TrainResult | None) -> TrainingSummary | None:
    if result is None:
        return None
    fields: dict[str, Any] = {name: getattr(result, name) for name in TrainingSummary.model_fields}
    return TrainingSummary(**fields)


def _benchmark(result: BenchmarkResult | None) -> BenchmarkSummary | None:
    if result is None:
        return None
    different = [prompt for prompt in result.comparisons if prompt.first_difference is not None]
    figures = result.acceptance
    return BenchmarkSummary(
        engine=result.engine,
        acceptance_length=figures.acceptance_length,
        num_speculative_tokens=figures.num_speculative_tokens,
        dataset_hash=result.dataset_hash,
        num_prompts=result.num_prompts,
        max_tokens=result.max_tokens,
        per_position=tuple(figures.per_position),
        conditional=tuple(figures.conditional),
        num_passes=figures.num_passes,
        lossless=result.lossless,
        num_ties=sum(prompt.tie for prompt in different),
        num_different=sum(not prompt.tie for prompt in different),
        speed_ratio=result.speed_ratio,
        baseline_tokens_per_second=result.baseline_tokens_per_second,
        draft_tokens_per_second=result.draft_tokens_per_second,
    )


def _agreement(train: TrainResult | None, benchmark: BenchmarkResult | None) -> AgreementSummary | None:
    """None where either is missing, or they drafted another number of tokens."""
    if train is None or benchmark is None:
        return None
    if train.replay.num_speculative_tokens != benchmark.acceptance.num_speculative_tokens:
        return None
    return acceptance_agreement(train.replay, benchmark.acceptance)


def _artifact(manifest: Manifest) -> ArtifactSummary:
    made = manifest.provenance
    return ArtifactSummary(
        ref=manifest.ref,
        parents=manifest.parents,
        sources=sources(manifest),
        state=manifest.state,
        bytes=manifest.bytes,
        num_files=len(manifest.files),
        created_at=made.created_at,
        made_by_run=made.run_id,
        seconds=made.seconds,
        git_commit=made.git_commit,
    )


def _versions(manifests: list[Manifest]) -> VersionSummary:
    """The engine's versions are those recorded in the newest artifact that an engine environment made."""
    made = [manifest.provenance for manifest in manifests if "torch" in manifest.provenance.packages]
    newest = max(made, key=lambda provenance: provenance.created_at, default=None)
    engine = {"python": newest.python} | newest.packages if newest else {}
    return VersionSummary(orchestrator=installed_versions(), engine=engine)
