"""What a step takes and leaves, and what it says while it runs."""

from __future__ import annotations

import time
from typing import Any, Literal

from pydantic import BaseModel, Field

from eagle3_core.contracts.base import (
    EngineInfoResult,
    EngineInfoSpec,
    FetchTargetResult,
    FetchTargetSpec,
    Message,
    StepSpec,
)
from eagle3_core.contracts.drafts import BenchmarkResult, ExportResult, TrainResult
from eagle3_core.contracts.states import (
    ExportCaptureResult,
    ExportCaptureSpec,
    ExtractResult,
    ImportResult,
    ImportSpec,
    PrepareResult,
    ProbeResult,
    ProbeSpec,
    VerifyResult,
)

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


class StepFailure(Message):
    """How a step failed."""

    error_type: str
    message: str
    traceback: str
    is_user_error: bool
    details: dict[str, Any] = Field(default={}, description="Findings that the error carried, for tables.")
    at: float = Field(
        default_factory=time.monotonic, description="When, by the clock that all processes of a host share."
    )


class StepOutcome(Message):
    """What a step leaves in its result file."""

    status: Literal["ok", "failed"]
    result: dict[str, Any] | None = None
    failure: StepFailure | None = None
    seconds: float


class ProgressEvent(Message):
    """A line of progress."""

    step: str
    done: float
    total: float | None
    unit: str
    message: str = ""
    is_paused: bool = Field(default=False, description="Work waits for space; `message` says where.")
    metrics: dict[str, float] = Field(default={}, description="Figures beside it, by name.")
