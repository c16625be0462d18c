"""The sections of a run configuration; `eagle3_core.config` puts them together.

Units are in the field names or the descriptions; the command line, the Prefect form and the reference page
are generated from them.
"""

from eagle3_core.sections.base import Dtype, Section
from eagle3_core.sections.host import EngineConfig, LimitsConfig
from eagle3_core.sections.serving import BenchmarkConfig, ExportConfig
from eagle3_core.sections.states import (
    CAPTURE_MARGIN_TOKENS,
    SGLANG_MARGIN_TOKENS,
    CaptureConfig,
    DataConfig,
    GenerationConfig,
    TargetConfig,
    VerifyConfig,
)
from eagle3_core.sections.store import ObjectStoreConfig, RetentionConfig
from eagle3_core.sections.training import DraftConfig, LossConfig, TrainConfig

__all__ = [
    "CAPTURE_MARGIN_TOKENS",
    "SGLANG_MARGIN_TOKENS",
    "BenchmarkConfig",
    "CaptureConfig",
    "DataConfig",
    "DraftConfig",
    "Dtype",
    "EngineConfig",
    "ExportConfig",
    "GenerationConfig",
    "LimitsConfig",
    "LossConfig",
    "ObjectStoreConfig",
    "RetentionConfig",
    "Section",
    "TargetConfig",
    "TrainConfig",
    "VerifyConfig",
]
