"""Sections of what is captured: target, data, capture, verification."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ByteSize, Field, field_validator, model_validator

from eagle3_core.sections.base import Dtype, Fraction, Section

CAPTURE_MARGIN_TOKENS = 4
"""vLLM captures nothing for a batch with a sequence that comes within two tokens of its longest one."""
SGLANG_MARGIN_TOKENS = 8
"""SGLang refuses a prompt that comes within six tokens of its context length."""


class TargetConfig(Section):
    """The large model that is to be served faster."""

    model: str = Field(
        description="A built-in target (`smollm2-135m`), a local Hugging Face folder, or a hub id that is "
        "already in the local hub cache."
    )
    revision: str | None = Field(default=None, description="Hub revision; None takes the cached default.")
    dtype: Dtype = Field(default="bfloat16", description="Compute dtype of the target in the engine.")
    trust_remote_code: bool = Field(default=False, description="Let the engine run code of the target.")
    aux_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="Capture ids of the auxiliary hidden states: id k is the state entering decoder layer k. "
        "None means (2, N//2, N-3) for N layers.",
    )


class GenerationConfig(Section):
    """How the target answers the prompts itself (on-policy data)."""

    max_tokens: int = Field(default=128, ge=2, le=131072, description="Longest answer of a turn, tokens.")
    temperature: float = Field(default=0.0, ge=0.0, le=2.0, description="0 decodes greedily.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus; used when temperature > 0.")
    seed: int = Field(default=0, ge=0, description="Sampling seed; used when temperature > 0.")


class DataConfig(Section):
    """Prompts, the target's answers to them, and tokenisation."""

    prompts: tuple[str, ...] = Field(
        default=("builtin",),
        min_length=1,
        description="Sources of conversations: `builtin` for the shipped prompts, or JSONL files with "
        '{"id", "kind", "split", "messages"} per line; a single one needs no list.',
    )
    heldout_fraction: Fraction = Field(
        default=0.1,
        description="Share of each kind held out from training, for rows that do not name their split.",
    )
    capture: str | None = Field(
        default=None,
        description="Train on this capture of the store, KIND/ID, that `eagle3 capture import` has made. Its "
        "dataset is used, and no prompts are answered.",
    )
    generation: GenerationConfig = Field(default=GenerationConfig(), description="The target's own answers.")
    max_length: int = Field(default=2048, ge=16, description="Longest sample in tokens; the rest is cut.")
    min_trainable_tokens: int = Field(
        default=2,
        ge=1,
        description="Samples with fewer answer tokens are rejected. One with an answer that is empty or "
        "white space alone is rejected whatever this says.",
    )
    max_rejected_fraction: Fraction = Field(
        default=0.5, description="More rejected samples than this share end the stage."
    )

    @field_validator("prompts", mode="before")
    @classmethod
    def _one_source(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class CaptureConfig(Section):
    """Which states are stored and how."""

    engine: Literal["vllm", "sglang", "reference"] = Field(
        default="vllm",
        description="`sglang` needs an environment of its own (`capture.python`); `reference` is a plain "
        "transformers forward: slow, for checks.",
    )
    python: str | None = Field(
        default=None,
        description="Interpreter of the environment of the capture engine; None is `engine.python`. For "
        "SGLang on the CPU `make setup-sglang` makes `.envs/engine-sglang-cpu/bin/python`.",
    )
    shard_bytes: ByteSize = Field(
        default=ByteSize(1 << 30), ge=4096, description="Target size of a shard, e.g. `1GiB`."
    )
    final_state: Literal["loss_rows", "all"] = Field(
        default="loss_rows",
        description="Store the last layer's state only for rows that a loss term reads, or for all.",
    )
    sha256: bool = Field(
        default=False,
        description="Record a SHA-256 of each shard too, for whoever compares files with other tools; made "
        "while the shard is written. The fast hash (xxh3_128) is always there.",
    )
    max_batched_tokens: int = Field(default=2048, ge=64, description="Prefill tokens of one engine step.")
    reference_batching: Literal["single", "padded", "packed"] = Field(
        default="single",
        description="How the engine `reference` runs samples: one at a time, or several in a forward of at "
        "most `max_batched_tokens`, padded to the longest or packed into one row. The results are the same.",
    )
    probe: bool = Field(
        default=True,
        description="Preflight captures a miniature of the target first and compares every layer with "
        "transformers, once for each engine version and architecture (half a minute).",
    )
    replicas: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Engines that take shards from one queue, each on `engine.tensor_parallel_size` GPUs. "
        "None uses all visible GPUs, and one engine on the CPU.",
    )
    max_quarantined_samples: int = Field(
        default=8, ge=0, description="More samples that kill an engine than this end the stage."
    )
    load_timeout_minutes: float = Field(
        default=60.0, gt=0, description="An engine that has not loaded after this time is ended."
    )
    stall_timeout_minutes: float = Field(
        default=20.0, gt=0, description="A loaded engine that returns no tokens for this time is restarted."
    )
    sglang_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Run SGLang as an HTTP server on this local port (one replica); None runs no server.",
    )
    sglang_hooks: Literal["auto", "layers", "model"] = Field(
        default="auto",
        description="Read states from the outputs of decoder layers, or let SGLang's model capture them "
        "itself; `auto` chooses by architecture.",
    )
    sglang_attention_backend: str | None = Field(
        default=None, description="SGLang's attention backend, e.g. `triton`; None lets SGLang choose."
    )


class VerifyConfig(Section):
    """Limits of the checks on stored states."""

    min_next_token_agreement: Fraction = Field(
        default=0.98,
        description="Share of checked rows where the target's norm and LM head on the stored final state "
        "reproduce the next token, near-ties counted as agreement.",
    )
    samples_per_shard: int = Field(
        default=8, ge=1, description="Samples of every shard whose meaning is checked."
    )
    reference_samples: int = Field(
        default=2,
        ge=0,
        description="Samples compared layer by layer with a transformers forward: so many in all, of shards "
        "from all over the capture; with `deep` so many of every shard.",
    )
    deep: bool = Field(
        default=False, description="Compare samples of every shard with a transformers forward, not a few."
    )
    max_bad_samples: int = Field(
        default=0,
        ge=0,
        description="More samples with values that are not finite end the stage; up to so many are left out "
        "of training.",
    )

    @model_validator(mode="after")
    def _deep_needs_samples(self) -> VerifyConfig:
        if self.deep and not self.reference_samples:
            raise ValueError("deep compares samples of every shard: set reference_samples to 1 or more")
        return self
