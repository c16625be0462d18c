"""Sections of the engine environment and of limits of the machine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3_core.sections.base import Section


class EngineConfig(Section):
    """The environment in which steps with tensors run."""

    python: str = Field(
        default=".envs/engine-cpu/bin/python", description="Interpreter of the engine environment."
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Where the engine runs.")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that hold one target together.")
    max_num_seqs: int = Field(default=32, ge=1, description="Sequences that the engine runs at once.")
    max_model_len: int = Field(default=2048, ge=32, description="Longest sequence in the engine, tokens.")
    kv_cache_gib: int = Field(default=2, ge=1, description="KV cache of vLLM on the CPU, whole GiB.")
    enforce_eager: bool = Field(
        default=False,
        description="No compilation and no CUDA graphs in vLLM: loads a minute sooner, generates slower. "
        "On the CPU it is always so.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of GPU memory for the engine."
    )
    gpu_kv_cache_gib: float | None = Field(
        default=None,
        gt=0,
        description="KV cache of vLLM on each GPU, GiB; None fills `gpu_memory_utilization`. With a size "
        "vLLM does not measure memory while it loads, so that engines can load on one GPU at once.",
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
