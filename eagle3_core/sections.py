"""The sections of a run configuration; `eagle3_core.config` puts them together.

Units are in the field names or the descriptions; the command line, the Prefect form and the reference page
are generated from them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

Dtype = Literal["bfloat16", "float16", "float32"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]

CAPTURE_MARGIN_TOKENS = 4
"""vLLM captures nothing for a batch with a sequence that comes within two tokens of its longest one."""
SGLANG_MARGIN_TOKENS = 8
"""SGLang refuses a prompt that comes within six tokens of its context length."""


class Section(BaseModel):
    """Base of all configuration models: frozen, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


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
        '{"id", "kind", "split", "messages"} per line.',
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
        default=2, ge=1, description="Samples with fewer answer tokens are rejected."
    )
    max_rejected_fraction: Fraction = Field(
        default=0.5, description="More rejected samples than this share end the stage."
    )


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
        description="A lower measured acceptance length fails the stage (a rehearsal with `limit` warns).",
    )


class EngineConfig(Section):
    """The environment in which steps with tensors run."""

    python: str = Field(
        default=".envs/engine-cpu/bin/python", description="Interpreter of the engine environment."
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where the engine runs.")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that hold one target together.")
    max_num_seqs: int = Field(default=32, ge=1, description="Sequences that the engine runs at once.")
    max_model_len: int = Field(default=2048, ge=32, description="Longest sequence in the engine, tokens.")
    kv_cache_gib: float = Field(default=2.0, gt=0, description="KV cache on the CPU, GiB.")
    enforce_eager: bool = Field(
        default=False,
        description="No compilation and no CUDA graphs in vLLM: loads a minute sooner, generates slower. "
        "On the CPU it is always so.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of GPU memory for the engine."
    )
    environment: dict[str, str] = Field(
        default={},
        description="Extra environment variables of the step's process. Secrets belong into the environment "
        "of the command or worker instead, which the step inherits.",
    )


class LimitsConfig(Section):
    """What the host must have, and how stages are retried."""

    min_free_memory_gib: float = Field(default=4.0, ge=0, description="Preflight needs this much memory.")
    min_free_disk_gib: float = Field(
        default=2.0, ge=0, description="Free space that must remain after the run's own needs, GiB."
    )
    check_disk: bool = Field(
        default=True,
        description="Refuse a run that does not fit on its disks. False lets it begin all the same: it then "
        "pauses or fails at the reserve.",
    )
    on_full_disk: Literal["pause", "fail"] = Field(
        default="pause",
        description="When the next shard, checkpoint or download would not fit above `min_free_disk_gib`, or "
        "a write finds the disk full: wait for space with engines loaded, or end the run; either way it can "
        "be gone on with.",
    )
    pause_timeout_minutes: float = Field(
        default=240.0,
        gt=0,
        description="A run that has waited for space so long fails; a step's own time-out goes on meanwhile.",
    )
    reservations: str | None = Field(
        default=None,
        description="Folder in which the runs of this host tell each other what they have yet to write; None "
        "is `eagle3/reservations` in XDG_STATE_HOME (`~/.local/state`). Runs of several users or containers "
        "see each other where all name one folder that all can write, e.g. `/var/lib/eagle3` of mode 1777, "
        "mounted into each container.",
    )
    step_retries: int = Field(default=1, ge=0, le=10, description="Retries of a failed step.")
    step_timeout_minutes: float = Field(default=720.0, gt=0, description="A step that runs longer is ended.")


class ObjectStoreConfig(Section):
    """How a store in `s3://` is reached; credentials come from the usual chain of AWS clients."""

    endpoint_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+(/.*)?$",
        description="URL of an S3-compatible server; None takes `AWS_ENDPOINT_URL` or AWS itself.",
    )
    region: str | None = Field(
        default=None, description="Region of the bucket; None takes `AWS_REGION` or the profile's."
    )
    checksum: Literal["sha256", "etag", "read_back"] = Field(
        default="sha256",
        description="How an upload is proven: SHA-256 checksums sent with every part and compared with the "
        "object's; Content-MD5 and the ETag, for servers that refuse checksum headers; or the object read "
        "back and hashed, for servers whose ETag is no MD5.",
    )
    part_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=5 << 20,
        le=5 << 30,
        description="Larger files are uploaded in parts of this size, each retried alone; `max_connections` "
        "of them are in memory at once.",
    )
    max_connections: int = Field(default=8, ge=1, le=128, description="Requests to the store at once.")
    attempts: int = Field(default=6, ge=1, le=20, description="Attempts of a request or a part.")
    outage_minutes: float = Field(
        default=30.0,
        ge=0,
        description="Uploads in the background and training's reads go on trying for this long while the "
        "store cannot be reached.",
    )
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A request without an answer for this long is given up; an upload gets the time that its "
        "bytes take at 128 KiB/s on top.",
    )
    upload_backlog_bytes: ByteSize = Field(
        default=ByteSize(8 << 30),
        ge=0,
        description="Finished files that may wait for their upload; with more, who makes them waits.",
    )
    cache_bytes: ByteSize = Field(
        default=ByteSize(16 << 30), ge=0, description="Local cache of samples that training reads."
    )
    read_ahead_bytes: ByteSize = Field(
        default=ByteSize(512 << 20), ge=0, description="Samples fetched before training asks for them."
    )


class RetentionConfig(Section):
    """What `eagle3 gc` and the stage cleanup move to the trash; the default names nothing.

    A policy names artifacts; what a kept artifact was made from, what a run uses, and a capture that no newer
    verified one replaces stay all the same.
    """

    keep_last_captures: int | None = Field(
        default=None, ge=1, description="Name all captures of a target but its newest complete ones."
    )
    older_than_days: float | None = Field(
        default=None, gt=0, le=36_500, description="Name every artifact that was made longer ago."
    )
    max_bytes: ByteSize | None = Field(
        default=None,
        ge=0,
        description="Name the oldest captures until the artifacts of the store take no more than this.",
    )
    unreferenced: bool = Field(
        default=False, description="Name captures and data from which no kept checkpoint was trained."
    )
    keep: tuple[str, ...] = Field(
        default=(),
        description="Artifacts (`KIND/ID`) that stay whatever a policy says, and what they were made from.",
    )
    purge_after_days: float = Field(
        default=7.0,
        ge=0,
        le=36_500,
        description="With a policy above, the stage cleanup removes for good what lies in the trash longer.",
    )

    @property
    def names_something(self) -> bool:
        """Whether any policy is set."""
        return self.unreferenced or any(
            limit is not None for limit in (self.keep_last_captures, self.older_than_days, self.max_bytes)
        )
