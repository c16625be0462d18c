"""Sections of the draft and its training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eagle3_core.sections.base import Fraction, Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class DraftConfig(Section):
    """The EAGLE-3 draft: a decoder layer, or a few, over the target's hidden states."""

    vocab_size: int | None = Field(
        default=None,
        ge=2,
        description="Draft vocabulary: the most frequent answer tokens. None keeps the target's vocabulary.",
    )
    num_layers: int = Field(default=1, ge=1, le=4, description="Decoder layers of the draft.")
    intermediate_size: int | None = Field(
        default=None, ge=8, description="MLP width; None takes the target's."
    )
    norm_before_residual: bool = Field(
        default=False, description="Residual stream starts from the normalised state."
    )
    norm_before_fc: bool = Field(
        default=False, description="Normalise the concatenated auxiliary states first."
    )
    fc_norm: bool = Field(default=False, description="Normalise each auxiliary state on its own.")
    norm_output: bool = Field(default=False, description="Feed the normalised state to the next TTT step.")
    train_lm_head: bool = Field(
        default=False, description="Train the draft's LM head; else it keeps the target's rows."
    )
    block: Literal["llama", "qwen3"] = Field(
        default="llama", description="Kind of decoder layer: `qwen3` normalises queries and keys by head."
    )
    sliding_window: int | None = Field(
        default=None,
        ge=16,
        description="Rows that a query attends to, its own included; None is full attention.",
    )

    @model_validator(mode="after")
    def _one_input_norm(self) -> DraftConfig:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: keep one")
        return self


class LossConfig(Section):
    """The loss of a row, from the distributions p of the target and q of the draft (draft vocabulary)."""

    kind: Literal["kl", "cross_entropy", "acceptance"] = Field(
        default="kl",
        description="`kl` is KL(p || q); `cross_entropy` takes the target's likeliest token as the truth; "
        "`acceptance` is (1 - w) KL(p || q) + w TV(p, q), where 1 - TV = sum min(p, q) is the chance that "
        "sampling accepts the draft's token.",
    )
    acceptance_eta: float | None = Field(
        default=3.0,
        ge=0.0,
        description="With `acceptance`: w of a row is 1 - exp(-eta sum min(p, q)), so that KL leads while "
        "p and q are far apart. None takes `acceptance_weight`.",
    )
    acceptance_weight: Fraction = Field(
        default=0.5, description="With `acceptance` and no `acceptance_eta`: w of every row."
    )


class TrainConfig(Section):
    """Training-time test (TTT) training of the draft."""

    ttt_steps: int = Field(default=3, ge=1, le=16, description="Draft steps unrolled in training.")
    num_epochs: int = Field(default=8, ge=1, description="Passes over the training samples.")
    pack_tokens: int = Field(
        default=1024, ge=32, description="Tokens of one pack: what a GPU computes at once."
    )
    packs_per_step: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Packs of one optimizer step, which the GPUs share; one GPU computes them one after the "
        "other (gradient accumulation). More GPUs than this have nothing to do.",
    )
    num_ranks: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Processes that share each step, one on a GPU. None is one for each visible GPU, but no "
        "more than `packs_per_step`; on the CPU it is one. The result is the same but for rounding.",
    )
    parallel: Literal["auto", "ddp", "fsdp2"] = Field(
        default="auto",
        description="With several ranks: `ddp` keeps weights and optimizer state whole on each, `fsdp2` "
        "shards them; `auto` shards where they would take much of a GPU's memory.",
    )
    loss: LossConfig = Field(default=LossConfig(), description="The loss of a row.")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="`muon` orthogonalises the updates of the layers' matrices; the LM head and vectors stay "
        "with AdamW.",
    )
    learning_rate: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW betas.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of matrices; vectors have none.")
    muon_learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="Peak learning rate of Muon's matrices; None is `learning_rate`, because an update is "
        "scaled to the size that AdamW's has.",
    )
    muon_momentum: Beta = Field(default=0.95, description="Momentum of Muon (Nesterov).")
    state_noise: Literal["none", "uniform", "normal"] = Field(
        default="none",
        description="Noise on the auxiliary states in training: the same for equal seed, epoch and sample.",
    )
    state_noise_scale: float = Field(
        default=0.05,
        ge=0.0,
        description="Size of the noise beside the root mean square of a row's state in that layer: `uniform` "
        "noise lies within it, `normal` noise has it as standard deviation.",
    )
    warmup_fraction: Fraction = Field(default=0.03, description="Share of all steps spent warming up.")
    schedule: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="Decay.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradient clipping.")
    step_loss_decay: float = Field(
        default=1.0, gt=0, le=1.0, description="Weight of TTT step k is this to the power k."
    )
    compute_dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Autocast dtype; weights and optimizer state stay fp32."
    )
    seed: int = Field(default=0, ge=0, description="Initialisation and sample order.")
    checkpoint_every_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A resumable checkpoint is written this often in the background, and at evaluations.",
    )
    keep_last: int = Field(
        default=2, ge=1, le=100, description="Newest resumable checkpoints that stay while training goes on."
    )
    keep_best: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Weights of so many evaluations, the best by held-out acceptance length, are kept: the "
        "best as the draft, the others beside it as `best-<step>.safetensors`.",
    )
    evaluate_every_steps: int | None = Field(
        default=None,
        ge=1,
        description="Look at the held-out split after every so many optimizer steps as well as after each "
        "epoch.",
    )
    early_stop_evaluations: int | None = Field(
        default=None,
        ge=1,
        description="Stop when so many evaluations in a row have not raised the best held-out acceptance "
        "length by `early_stop_min_gain`; None trains all epochs.",
    )
    early_stop_min_gain: float = Field(
        default=0.0, ge=0, description="Gain in acceptance length that counts; more than 0 if this is 0."
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="A step whose loss or gradient is NaN or infinite ends training, or is left out and "
        "counted; either way its samples are named.",
    )
    on_spike: Literal["warn", "skip", "stop"] = Field(
        default="warn",
        description="The same for a step whose loss or gradient norm is a spike; `warn` takes it, names its "
        "samples and counts it.",
    )
    spike_factor: float = Field(
        default=10.0,
        ge=3.0,
        description="A spike exceeds the median of recent steps by more than this many times their spread: "
        "1.4826 x the median absolute deviation, and at least a tenth of the median.",
    )
    spike_window_steps: int = Field(
        default=64, ge=16, le=4096, description="Recent steps that a spike is judged by; 16 are needed."
    )
    max_skipped_steps: int = Field(
        default=8, ge=0, description="More steps left out as not finite or as spikes end training."
    )
    stall_timeout_minutes: float = Field(
        default=30.0,
        gt=0,
        description="Several ranks that do no step for this time are ended, and where each of them stands is "
        "in the log; training goes on from its last checkpoint when it runs again.",
    )
    tensorboard: bool = Field(
        default=True, description="Write TensorBoard event files into the run's folder."
    )

    @model_validator(mode="after")
    def _every_rank_has_work(self) -> TrainConfig:
        if self.num_ranks is not None and self.num_ranks > self.packs_per_step:
            raise ValueError(
                f"num_ranks is {self.num_ranks}, but packs_per_step is {self.packs_per_step}: some ranks "
                "would never have a pack; raise packs_per_step or lower num_ranks"
            )
        return self

    @model_validator(mode="after")
    def _muon_needs_whole_matrices(self) -> TrainConfig:
        if self.optimizer == "muon" and self.parallel == "fsdp2":
            raise ValueError("muon steps whole matrices, which fsdp2 shards: set parallel to ddp or auto")
        return self
