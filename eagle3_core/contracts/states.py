"""Results of the steps that make and check captured states."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import RunConfig
from eagle3_core.contracts.base import ForeignFormat, Message, Rejection


class PrepareResult(Message):
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


class ExtractResult(Message):
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


class LayerCheck(Message):
    """How one stored layer compares with a reference forward: medians of ‖a−b‖/‖b‖ over rows."""

    capture_id: int
    nearest_id: int = Field(description="The reference layer that is nearest; must be `capture_id`.")
    median_error: float
    p99_error: float
    nearest_wrong_median: float = Field(description="The distance to the nearest other layer.")


class ProbeSpec(Message):
    """Asks whether an engine captures what we think it captures, for one architecture."""

    config: RunConfig = Field(description="Engine, device and auxiliary ids; the rest does not matter.")
    target_config: dict[str, Any] = Field(description="The target's `config.json`.")
    folder: str = Field(description="Scratch folder for the miniature and its shards.")


ProbeOutcome = Literal["ok", "wrong", "unsupported", "failed"]


class ProbeResult(Message):
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


class NonFinite(Message):
    """Values of one stored layer of a sample that are not finite."""

    capture_id: int
    num_nan: int
    num_inf: int

    def __str__(self) -> str:
        return f"capture id {self.capture_id} has {self.num_nan} NaN and {self.num_inf} Inf"


class BadSample(Message):
    """A stored sample that must not be trained on."""

    key: str
    shard: str
    problem: str
    nonfinite: list[NonFinite] = Field(default=[], description="By layer; empty for other problems.")


class CondemnedShard(Message):
    """A shard that the next extract makes anew."""

    shard: str
    reason: str


class VerifyResult(Message):
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


class ImportSpec(Message):
    """Makes a dataset and a capture of a folder in a foreign format."""

    config: RunConfig = Field(description="Target, auxiliary ids, final-state policy, shards and store.")
    target_path: str
    folder: str
    format: ForeignFormat
    layer_ids: tuple[int, ...] | None = Field(
        default=None, description="The stored layers in the format's own counting, the final one last."
    )


class ImportResult(Message):
    """What a folder was made into."""

    dataset: ArtifactRef
    capture: ArtifactRef
    num_samples: int
    num_tokens: int
    num_shards: int
    num_new_shards: int = Field(description="Shards made now; the others were there already.")
    bytes: int


class ExportCaptureSpec(Message):
    """Writes a capture as a folder in a foreign format."""

    config: RunConfig = Field(description="Names the store.")
    capture: ArtifactRef
    folder: str
    format: ForeignFormat


class ExportCaptureResult(Message):
    """A folder in a foreign format."""

    folder: str
    num_samples: int
    bytes: int
