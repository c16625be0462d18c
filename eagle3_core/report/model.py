"""What `summary.json` holds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.contracts import AcceptanceFigures, EpochMetrics, KeptWeights, PrepareResult, VerifyResult
from eagle3_core.host.run_folder import RunState, StageRecord
from eagle3_core.lineage import Source


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CaptureSummary(_Part):
    """Captured hidden states."""

    tokens: int
    bytes: int
    tokens_per_second: float | None = Field(description="None when every shard was there already.")
    num_shards: int
    num_samples: int


class TrainingSummary(_Part):
    """Training, epoch by epoch."""

    num_steps: int
    num_parameters: int = Field(description="Trained parameters.")
    tokens_per_second: float | None
    best_epoch: int
    epochs: tuple[EpochMetrics, ...]
    replay: AcceptanceFigures = Field(description="The trainer's estimate on the benchmark's prompts.")
    evaluations: tuple[EpochMetrics, ...] = Field(
        default=(), description="All looks at the held-out split, also within epochs."
    )
    kept: tuple[KeptWeights, ...] = Field(default=(), description="The best of them, the best first.")
    num_planned_steps: int | None = Field(default=None, description="Steps of all epochs.")
    resumed_from_step: int | None = Field(default=None, description="None where it was not interrupted.")
    early_stop: str = ""
    num_empty_packs: int = 0
    num_skipped_steps: int = 0
    num_spikes: int = 0
    warm_up_seconds: float | None = None
    data_wait_share: float | None = None
    mfu: float | None = Field(default=None, description="Model FLOP utilisation.")
    peak_memory_bytes: int | None = None


class BenchmarkSummary(_Part):
    """Acceptance and speed in the serving engine."""

    engine: str
    acceptance_length: float = Field(description="Tokens produced per target pass, bonus token counted.")
    num_speculative_tokens: int = Field(description="K, drafted tokens per pass.")
    dataset_hash: str
    num_prompts: int = Field(description="n, held-out prompts decoded.")
    max_tokens: int
    per_position: tuple[float, ...] = Field(description="Share of passes in which position k was accepted.")
    conditional: tuple[float | None, ...] = Field(
        description="Share accepted at k among passes accepted up to k-1; None where there were none."
    )
    num_passes: int
    lossless: Literal["identical", "ties", "differs"]
    num_ties: int = Field(description="Prompts whose first difference is within rounding.")
    num_different: int = Field(description="Prompts whose first difference is not.")
    speed_ratio: float | None = Field(description="With the draft over without, one sequence at a time.")
    baseline_tokens_per_second: float | None
    draft_tokens_per_second: float | None


class AgreementSummary(_Part):
    """How the trainer's replay of the benchmark's prompts compares with what the engine measured.

    The engine is the authority; a large difference means that draft, states or rows do not line up.
    """

    accepted_ratio: float | None = Field(
        description="Replay over engine, accepted drafts per pass (acceptance length minus 1); None if the "
        "engine accepted none."
    )
    first_position_difference: float = Field(description="Replay minus engine, rate of position 1.")


class ArtifactSummary(_Part):
    """One artifact that the run made, reused or built on."""

    ref: ArtifactRef
    parents: dict[str, ArtifactRef]
    sources: dict[str, Source] = Field(
        default={}, description="Prompt files and target, by role, of artifacts that were made from them."
    )
    state: Literal["partial", "complete"]
    bytes: int
    num_files: int
    created_at: str
    made_by_run: str | None
    seconds: float | None = Field(description="Time it took to make, in all attempts.")
    git_commit: str | None


class VersionSummary(_Part):
    """What the run used: the orchestrator's packages, and those of the engine that made the artifacts."""

    orchestrator: dict[str, str]
    engine: dict[str, str]


class RunSummary(_Part):
    """A whole run; what is not known (yet) is null."""

    format_version: Literal[1] = 1
    run_id: str
    profile: str
    state: RunState
    message: str = Field(description="Why the run failed; empty otherwise.")
    is_rehearsal: bool = Field(description="Run on `limit` prompts: the figures say nothing about quality.")
    created_at: str
    written_at: str
    seconds: float = Field(description="Sum over the stages.")
    git_commit: str | None
    stages: tuple[StageRecord, ...]
    prepare: PrepareResult | None = None
    capture: CaptureSummary | None = None
    verification: VerifyResult | None = None
    training: TrainingSummary | None = None
    benchmark: BenchmarkSummary | None = None
    agreement: AgreementSummary | None = None
    artifacts: tuple[ArtifactSummary, ...] = Field(default=(), description="Ancestors first.")
    versions: VersionSummary
    problems: tuple[str, ...] = Field(
        default=(), description="Artifacts or results that could not be read for this summary."
    )
