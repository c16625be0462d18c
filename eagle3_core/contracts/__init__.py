"""The typed specs and results of the steps; imported on both sides of the step boundary, so without torch.

A step gets plans of the artifacts it must make (the orchestrator has decided their ids) and names of those
it reads, and returns small counts: tensors and samples stay in the store.
"""

from eagle3_core.contracts.base import (
    METRICS_FILE,
    EngineInfoResult,
    EngineInfoSpec,
    FetchTargetResult,
    FetchTargetSpec,
    ForeignFormat,
    Rejection,
    StepName,
    StepSpec,
)
from eagle3_core.contracts.drafts import (
    AcceptanceFigures,
    BenchmarkResult,
    EpochMetrics,
    ExportResult,
    KeptWeights,
    PromptComparison,
    TrainResult,
)
from eagle3_core.contracts.process import RESULT_TYPES, SPEC_TYPES, ProgressEvent, StepFailure, StepOutcome
from eagle3_core.contracts.states import (
    BadSample,
    CondemnedShard,
    ExportCaptureResult,
    ExportCaptureSpec,
    ExtractResult,
    ImportResult,
    ImportSpec,
    LayerCheck,
    NonFinite,
    PrepareResult,
    ProbeOutcome,
    ProbeResult,
    ProbeSpec,
    VerifyResult,
)

__all__ = [
    "METRICS_FILE",
    "RESULT_TYPES",
    "SPEC_TYPES",
    "AcceptanceFigures",
    "BadSample",
    "BenchmarkResult",
    "CondemnedShard",
    "EngineInfoResult",
    "EngineInfoSpec",
    "EpochMetrics",
    "ExportCaptureResult",
    "ExportCaptureSpec",
    "ExportResult",
    "ExtractResult",
    "FetchTargetResult",
    "FetchTargetSpec",
    "ForeignFormat",
    "ImportResult",
    "ImportSpec",
    "KeptWeights",
    "LayerCheck",
    "NonFinite",
    "PrepareResult",
    "ProbeOutcome",
    "ProbeResult",
    "ProbeSpec",
    "ProgressEvent",
    "PromptComparison",
    "Rejection",
    "StepFailure",
    "StepName",
    "StepOutcome",
    "StepSpec",
    "TrainResult",
    "VerifyResult",
]
