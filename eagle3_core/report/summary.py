"""The summary of a run: what it did and what came out, typed, small enough to read as JSON.

It is made from the run folder (`config.yaml`, `stages.json`) and the manifests of the artifacts that the
stages name. A run that failed half way has a summary too: figures that do not exist yet are null.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3_core.artifacts import ArtifactKind, ArtifactRef, Manifest, installed_versions
from eagle3_core.config import RunConfig, parse_config
from eagle3_core.contracts import (
    AcceptanceFigures,
    BenchmarkResult,
    EpochMetrics,
    ExtractResult,
    PrepareResult,
    TrainResult,
    VerifyResult,
)
from eagle3_core.errors import StoreError
from eagle3_core.store.local import LocalStore

CONFIG_FILE = "config.yaml"
STAGES_FILE = "stages.json"
SUMMARY_FILE = "summary.json"

Result = TypeVar("Result", bound=BaseModel)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StageSummary(BaseModel):
    """One stage of the run, as the flow recorded it in `stages.json`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    stage: str
    state: str = Field(description="pending, running, completed, failed, skipped or cancelled.")
    seconds: float | None = Field(default=None, description="Wall-clock time of the stage in this run.")
    reused: bool = Field(default=False, description="The artifacts were there already and were checked.")
    artifacts: tuple[ArtifactRef, ...] = Field(default=(), description="Made or reused by the stage.")
    message: str | None = Field(default=None, description="Why it failed or was skipped.")


class CaptureSummary(_Part):
    """Captured hidden states."""

    tokens: int
    bytes: int
    tokens_per_second: float | None = Field(description="None when every shard was reused.")
    num_shards: int
    num_samples: int


class TrainingSummary(_Part):
    """Training, epoch by epoch."""

    num_steps: int
    num_parameters: int
    tokens_per_second: float | None
    best_epoch: int
    epochs: tuple[EpochMetrics, ...]
    replay: AcceptanceFigures = Field(description="The trainer's estimate on the benchmark's prompts.")


class AgreementSummary(_Part):
    """How the trainer's replay of the benchmark's prompts compares with what the engine measured.

    The engine is the authority; a large difference means that draft, states or rows do not line up.
    """

    accepted_ratio: float | None = Field(
        description="Replay over engine, accepted drafts per pass (acceptance length minus 1)."
    )
    first_position_difference: float = Field(description="Replay minus engine, rate of position 1.")


class BenchmarkSummary(_Part):
    """Acceptance and speed in the serving engine."""

    engine: str
    acceptance_length: float = Field(description="Tokens produced per target pass, bonus token counted.")
    num_speculative_tokens: int = Field(description="K, drafted tokens per pass.")
    dataset_hash: str
    num_prompts: int
    max_tokens: int
    per_position: tuple[float, ...] = Field(description="Share of passes in which position k was accepted.")
    conditional: tuple[float | None, ...] = Field(
        description="Share accepted at k among passes accepted up to k-1."
    )
    num_passes: int
    lossless: Literal["identical", "ties", "differs"]
    num_ties: int
    num_different: int
    speed_ratio: float | None = Field(description="With draft over without, one sequence at a time.")
    baseline_tokens_per_second: float | None
    draft_tokens_per_second: float | None


class ArtifactSummary(_Part):
    """One artifact of the run's lineage."""

    ref: ArtifactRef
    parents: dict[str, ArtifactRef]
    bytes: int
    num_files: int
    state: Literal["partial", "complete"]
    created_at: str
    run_id: str | None
    seconds: float | None
    git_commit: str | None


class VersionSummary(_Part):
    """What the run used: of the orchestrator, and of the engine environment that made the artifacts."""

    orchestrator: dict[str, str]
    engine: dict[str, str]


class RunSummary(_Part):
    """`summary.json`."""

    format_version: Literal[1] = 1
    run_id: str
    profile: str
    state: Literal["completed", "failed", "unfinished"]
    is_rehearsal: bool = Field(description="Run on `limit` prompts: figures say nothing about quality.")
    written_at: str
    seconds: float = Field(description="Sum over the stages.")
    stages: tuple[StageSummary, ...]
    prepare: PrepareResult | None = None
    capture: CaptureSummary | None = None
    verification: VerifyResult | None = None
    training: TrainingSummary | None = None
    benchmark: BenchmarkSummary | None = None
    agreement: AgreementSummary | None = None
    artifacts: tuple[ArtifactSummary, ...] = ()
    versions: VersionSummary
    problems: tuple[str, ...] = Field(
        default=(), description="Artifacts or results that could not be read for this summary."
    )


def read_run_config(run_folder: Path) -> RunConfig:
    """The configuration that the run used, as resolved.

    Raises:
        StoreError: missing or unreadable.
        ConfigError: not a run configuration.
    """
    path = run_folder / CONFIG_FILE
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise StoreError(f"cannot read {path} ({error})", remedy="is this a run folder?") from error
    return parse_config(document, source=str(path))


def read_stages(run_folder: Path) -> tuple[StageSummary, ...]:
    """The stages that the flow recorded; none if it ended before the first.

    Raises:
        StoreError: the file is damaged.
    """
    path = run_folder / STAGES_FILE
    try:
        document = json.loads(path.read_text())
        rows = document["stages"] if isinstance(document, dict) else document
        return tuple(StageSummary.model_validate(row) for row in rows)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"cannot read {path} ({' '.join(str(error).split())})") from error


def summarise(run_folder: Path, store: LocalStore) -> RunSummary:
    """Everything that is known about a run now.

    Raises:
        StoreError: the run folder has no readable configuration or stages.
    """
    config = read_run_config(run_folder)
    stages = read_stages(run_folder)
    lineage, problems = _lineage(store, [ref for stage in stages for ref in stage.artifacts])
    results = _Results(lineage, problems)
    train = results.read("checkpoint", TrainResult)
    benchmark = results.read("benchmark", BenchmarkResult)
    return RunSummary(
        run_id=run_folder.name,
        profile=config.name,
        state=_run_state(stages),
        is_rehearsal=config.limit is not None,
        written_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=sum(stage.seconds or 0.0 for stage in stages),
        stages=stages,
        prepare=results.read("vocabulary", PrepareResult),
        capture=_capture(results.read("capture", ExtractResult)),
        verification=results.read("verification", VerifyResult),
        training=_training(train),
        benchmark=_benchmark(benchmark),
        agreement=_agreement(train, benchmark),
        artifacts=tuple(_artifact(manifest) for manifest in lineage),
        versions=_versions(lineage),
        problems=tuple(problems),
    )


def acceptance_agreement(replay: AcceptanceFigures, engine: AcceptanceFigures) -> AgreementSummary:
    """Compare two measurements of the same prompts with the same K."""
    accepted = engine.acceptance_length - 1
    return AgreementSummary(
        accepted_ratio=(replay.acceptance_length - 1) / accepted if accepted > 0 else None,
        first_position_difference=replay.per_position[0] - engine.per_position[0],
    )


class _Results:
    """Typed step results out of the manifests of a run."""

    def __init__(self, lineage: list[Manifest], problems: list[str]) -> None:
        self._by_kind: dict[ArtifactKind, Manifest] = {manifest.ref.kind: manifest for manifest in lineage}
        self._problems = problems

    def read(self, kind: ArtifactKind, model: type[Result]) -> Result | None:
        """The result that the artifact of this kind carries, or None."""
        manifest = self._by_kind.get(kind)
        if manifest is None or manifest.state != "complete":
            return None
        try:
            return model.model_validate(manifest.facts["result"])
        except (KeyError, ValidationError) as error:
            self._problems.append(
                f"{manifest.ref} carries no readable result ({' '.join(str(error).split())})"
            )
            return None


def _lineage(store: LocalStore, refs: list[ArtifactRef]) -> tuple[list[Manifest], list[str]]:
    """The manifests of artifacts and all their ancestors, ancestors first, and what could not be read."""
    ordered: dict[str, Manifest] = {}
    visited: set[str] = set()
    problems: list[str] = []

    def visit(ref: ArtifactRef) -> None:
        if str(ref) in visited:
            return
        visited.add(str(ref))
        try:
            manifest = store.find(ref)
        except StoreError as error:
            problems.append(str(error))
            return
        if manifest is None:
            problems.append(f"{ref} is not in {store.root}")
            return
        for parent in manifest.parents.values():
            visit(parent)
        ordered[str(ref)] = manifest

    for ref in refs:
        visit(ref)
    return list(ordered.values()), problems


def _run_state(stages: tuple[StageSummary, ...]) -> Literal["completed", "failed", "unfinished"]:
    """Of all stages but the report itself, which is running while this is written."""
    states = {stage.state for stage in stages if stage.stage != "report"}
    if states & {"failed", "cancelled", "crashed"}:
        return "failed"
    return "completed" if states and states <= {"completed", "skipped"} else "unfinished"


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
    different = [c for c in result.comparisons if c.first_difference is not None]
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
        num_ties=sum(c.tie for c in different),
        num_different=sum(not c.tie for c in different),
        speed_ratio=result.speed_ratio,
        baseline_tokens_per_second=result.baseline_tokens_per_second,
        draft_tokens_per_second=result.draft_tokens_per_second,
    )


def _agreement(train: TrainResult | None, benchmark: BenchmarkResult | None) -> AgreementSummary | None:
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
        bytes=manifest.bytes,
        num_files=len(manifest.files),
        state=manifest.state,
        created_at=made.created_at,
        run_id=made.run_id,
        seconds=made.seconds,
        git_commit=made.git_commit,
    )


def _versions(lineage: list[Manifest]) -> VersionSummary:
    """Engine packages come from the newest artifact that an engine environment made."""
    engine = [manifest.provenance for manifest in lineage if "torch" in manifest.provenance.packages]
    newest = max(engine, key=lambda made: made.created_at, default=None)
    packages = {"python": newest.python} | newest.packages if newest else {}
    return VersionSummary(orchestrator=installed_versions(), engine=packages)
