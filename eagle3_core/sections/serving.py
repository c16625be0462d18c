"""Sections of export and benchmark."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3_core.sections.base import Section


class ExportConfig(Section):
    """The folder that the serving engine loads."""

    engines: tuple[Literal["vllm"], ...] = Field(
        default=("vllm",), min_length=1, description="Serving engines to export for."
    )
    serving: tuple[Literal["vllm", "sglang"], ...] = Field(
        default=(),
        description="More engines that will serve the draft: its options are refused where one of these, or "
        "of `engines`, would not load or would ignore them.",
    )
    include_embedding: bool = Field(
        default=False,
        description="Ship a copy of the target's embedding; without it the engine shares the target's.",
    )


class BenchmarkConfig(Section):
    """Acceptance and speed in the real serving engine."""

    num_prompts: int = Field(default=32, ge=1, description="Held-out prompts to decode.")
    max_tokens: int = Field(default=64, ge=2, description="Tokens decoded for each prompt.")
    num_speculative_tokens: int = Field(default=3, ge=1, le=16, description="Draft tokens per pass (K).")
    concurrency: int = Field(default=32, ge=1, description="Sequences at once for the acceptance figures.")
    measure_speed: bool = Field(
        default=True, description="Also decode one sequence at a time, with and without the draft."
    )
    min_acceptance_length: float = Field(
        default=1.0,
        ge=1.0,
        description="A lower measured acceptance length fails the stage, as does 1: no drafted token was "
        "accepted (a rehearsal with `limit` warns).",
    )
