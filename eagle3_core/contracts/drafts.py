"""Results of the steps that make and measure a draft."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3_core.contracts.base import Message, Rejection


class AcceptanceFigures(Message):
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


class EpochMetrics(Message):
    """An epoch of training up to a look at the held-out split, which most often is its end."""

    epoch: int
    step: int
    train_loss: float
    heldout_loss: float
    heldout: AcceptanceFigures
    learning_rate: float
    seconds: float
    is_epoch_end: bool = True


class KeptWeights(Message):
    """Weights that a finished checkpoint holds."""

    step: int
    epoch: int
    acceptance_length: float = Field(description="Held-out estimate, by which they were chosen.")
    file: str


class TrainResult(Message):
    """A trained draft."""

    num_steps: int
    num_parameters: int = Field(description="Trained parameters.")
    resumed_from_step: int | None
    num_planned_steps: int | None = Field(
        default=None, description="Of all epochs; more than `num_steps` where training ended early."
    )
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


class ExportResult(Message):
    """A folder that the serving engine loads."""

    path: str = Field(description="Folder of the artifact; each engine loads the folder of its name in it.")
    bytes: int
    engines: list[str]


class PromptComparison(Message):
    """How one prompt's outputs with and without the draft compare."""

    key: str
    num_tokens: int
    first_difference: int | None
    tie: bool
    margin: float | None = Field(
        default=None, description="Reference logit difference at the first difference."
    )


class BenchmarkResult(Message):
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
