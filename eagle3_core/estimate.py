"""How many bytes and minutes a run will take: exact where the dataset exists, rough before.

The rates were measured with a target of 135 million parameters on two CPU cores and on one H200, and are
scaled by the size of the target and the number of cores. They tell minutes from hours, no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactKind, ArtifactRef
from eagle3_core.config import STAGES, RunConfig, Stage
from eagle3_core.errors import DataError, HostError
from eagle3_core.host.inspect import free_disk_bytes, inspect_host
from eagle3_core.host.volume import volume_of
from eagle3_core.identity import draft_vocab_size, prompt_files, resolve_aux_layer_ids
from eagle3_core.planning import MAKING_STAGE, RunPlan
from eagle3_core.store.dataset import Sample, read_dataset
from eagle3_core.store.shards import DTYPE_BYTES, ShardLayout
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import final_layer_id

GIB = 1 << 30
CHARACTERS_PER_TOKEN = 4
TEMPLATE_TOKENS_PER_MESSAGE = 8
CHECKPOINT_COPIES = 3
"""The newest resumable state, the one being written, and the best weights."""
OPTIMIZER_COPIES = 2
SMALL_FILE_BYTES = 1 << 20
SHARD_OVERHEAD = 1.02

RATES: dict[str, dict[str, float]] = {
    "cpu": {"generate": 860, "generate_one": 50, "capture": 2200, "train": 1500, "load_seconds": 15},
    "cuda": {"generate": 18000, "generate_one": 250, "capture": 100000, "train": 30000, "load_seconds": 60},
}
"""Tokens per second by device."""
REFERENCE_WEIGHT_BYTES = 270_000_000
REFERENCE_CORES = 2


class Workload(BaseModel):
    """Tokens of a run."""

    model_config = ConfigDict(frozen=True)
    num_samples: int
    num_tokens: int
    num_answer_tokens: int
    is_exact: bool = Field(
        description="Counted in the dataset; otherwise an upper estimate from the prompts."
    )


class ArtifactEstimate(BaseModel):
    """One artifact of the plan."""

    model_config = ConfigDict(frozen=True)
    kind: ArtifactKind
    stage: Stage
    ref: ArtifactRef | None = Field(description="None until the dataset exists.")
    state: str = Field(description="complete, partial or missing.")
    bytes: int = Field(description="Of the finished artifact.")
    new_bytes: int = Field(description="Still to be written.")


class RunEstimate(BaseModel):
    """What a run will take."""

    model_config = ConfigDict(frozen=True)
    workload: Workload
    aux_layer_ids: tuple[int, ...]
    final_layer_id: int
    artifacts: tuple[ArtifactEstimate, ...]
    new_bytes: int
    free_bytes: int = Field(description="On the store's file system.")
    reserve_bytes: int = Field(description="Must stay free: limits.min_free_disk_gib.")
    minutes: dict[Stage, float] = Field(description="Rough; 0 for what is there already.")

    @property
    def total_minutes(self) -> float:
        """Rough minutes of all stages."""
        return sum(self.minutes.values())


def estimate_run(plan: RunPlan, stages: Iterable[Stage] = STAGES) -> RunEstimate:
    """Bytes and minutes of the stages that are to run."""
    config, target = plan.config, plan.target
    wanted = set(stages)
    samples = _dataset(plan)
    load = count_tokens(samples) if samples else guess_tokens(config)
    sizes = artifact_bytes(config, target, load, _state_bytes(plan, samples) if samples else None)
    artifacts = tuple(_artifact_estimate(plan, kind, sizes[kind], wanted) for kind in sizes)
    minutes = stage_minutes(config, target, load)
    done = {stage for stage in minutes if all(a.state == "complete" for a in artifacts if a.stage == stage)}
    return RunEstimate(
        workload=load,
        aux_layer_ids=resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers),
        final_layer_id=final_layer_id(target.num_layers),
        artifacts=artifacts,
        new_bytes=sum(artifact.new_bytes for artifact in artifacts),
        free_bytes=free_disk_bytes(config.store_path),
        reserve_bytes=round(config.limits.min_free_disk_gib * GIB),
        minutes={stage: 0.0 if stage in done else minutes[stage] for stage in minutes if stage in wanted},
    )


def check_space(estimate: RunEstimate, config: RunConfig) -> None:
    """Refuse a run that does not fit.

    Raises:
        HostError: states the bytes needed and free.
    """
    needed = estimate.new_bytes + estimate.reserve_bytes
    if needed > estimate.free_bytes:
        raise HostError(
            f"the run needs {estimate.new_bytes:,} bytes in {config.store_path} and "
            f"{estimate.reserve_bytes:,} must stay free, but {estimate.free_bytes:,} are free",
            remedy="free some space, set `store` to a larger disk, or use fewer prompts (`--limit`)",
        )
    if volume_of(config.store_path) != volume_of(config.workspace_path):
        free = free_disk_bytes(config.workspace_path)
        if free < SMALL_FILE_BYTES * 64:
            raise HostError(
                f"{config.workspace_path} has {free:,} bytes free",
                remedy="free some space for logs and reports",
            )


def count_tokens(samples: Sequence[Sample]) -> Workload:
    """The tokens of a dataset."""
    return Workload(
        num_samples=len(samples),
        num_tokens=sum(len(sample) for sample in samples),
        num_answer_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
        is_exact=True,
    )


def guess_tokens(config: RunConfig) -> Workload:
    """An upper estimate from the prompts: every answer as long as allowed.

    Raises:
        DataError: a prompt file is missing or unreadable.
    """
    rows = [row for file in prompt_files(config) for row in _read_rows(file)]
    rows = rows[: config.limit] if config.limit else rows
    answers = [config.data.generation.max_tokens * max(1, _user_turns(row)) for row in rows]
    prompts = [_prompt_tokens(row) for row in rows]
    longest = config.data.max_length
    return Workload(
        num_samples=len(rows),
        num_tokens=sum(min(longest, p + a) for p, a in zip(prompts, answers, strict=True)),
        num_answer_tokens=sum(min(longest, a) for a in answers),
        is_exact=False,
    )


def artifact_bytes(
    config: RunConfig, target: TargetInfo, load: Workload, state_bytes: int | None = None
) -> dict[ArtifactKind, int]:
    """Bytes of every artifact; `state_bytes` is the exact size of the states where it is known."""
    if state_bytes is None:
        num_aux = len(resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers))
        final = load.num_tokens if config.capture.final_state == "all" else load.num_answer_tokens
        state_bytes = _state_row_bytes(config, target) * (num_aux * load.num_tokens + final)
    trained, kept = draft_parameters(config, target)
    embedding = target.vocab_size * target.hidden_size if config.export.include_embedding else 0
    state = 4 * (trained * (1 + OPTIMIZER_COPIES) + kept)
    return {
        "conversations": 12 * load.num_tokens + SMALL_FILE_BYTES,
        "dataset": 6 * load.num_tokens + SMALL_FILE_BYTES,
        "vocabulary": 9 * target.vocab_size + SMALL_FILE_BYTES,
        "capture": round(state_bytes * SHARD_OVERHEAD),
        "verification": SMALL_FILE_BYTES,
        "checkpoint": CHECKPOINT_COPIES * state,
        "export": 4 * (trained + kept + embedding) + SMALL_FILE_BYTES,
        "benchmark": SMALL_FILE_BYTES,
    }


def draft_parameters(config: RunConfig, target: TargetInfo) -> tuple[int, int]:
    """Parameters of the draft: trained ones, and frozen rows of the target's LM head."""
    text, hidden = target.text_config, target.hidden_size
    heads = text.get("num_attention_heads", 1)
    key_heads = text.get("num_key_value_heads") or heads
    head_size = text.get("head_dim") or hidden // heads
    wide = config.draft.intermediate_size or text.get("intermediate_size", 4 * hidden)
    trained = 3 * hidden * hidden + hidden
    for layer in range(config.draft.num_layers):
        width = 2 * hidden if layer == 0 else hidden
        trained += width * (heads + 2 * key_heads) * head_size + heads * head_size * hidden
        trained += 3 * hidden * wide + 3 * hidden
    head = draft_vocab_size(config, target) * hidden
    return (trained + head, 0) if config.draft.train_lm_head else (trained, head)


def stage_minutes(config: RunConfig, target: TargetInfo, load: Workload) -> dict[Stage, float]:
    """Rough minutes of each stage that makes something."""
    device = config.engine.device
    rates = RATES[device]
    slowness = max(0.25, target.weights_bytes / REFERENCE_WEIGHT_BYTES)
    if device == "cpu":
        slowness *= REFERENCE_CORES / max(1, inspect_host().num_cpus)
    else:
        slowness /= config.engine.tensor_parallel_size
    bench = config.benchmark.num_prompts * config.benchmark.max_tokens
    one_at_a_time = 2 * bench / rates["generate_one"] if config.benchmark.measure_speed else 0.0
    work: dict[Stage, float] = {
        "prepare": load.num_answer_tokens / rates["generate"],
        "extract": load.num_tokens / rates["capture"],
        "verify": load.num_tokens / rates["capture"] / 2,
        "train": config.train.num_epochs * load.num_tokens / rates["train"] * config.train.ttt_steps / 3,
        "export": 0.0,
        "benchmark": 2 * bench / rates["generate"] + one_at_a_time,
    }
    return {stage: (seconds * slowness + rates["load_seconds"]) / 60 for stage, seconds in work.items()}


def _artifact_estimate(plan: RunPlan, kind: ArtifactKind, size: int, wanted: set[Stage]) -> ArtifactEstimate:
    manifest = plan.manifest(kind)
    there = manifest.bytes if manifest else 0
    state = manifest.state if manifest else "missing"
    makes_it = MAKING_STAGE[kind] in wanted and state != "complete"
    known = plan.artifacts.get(kind)
    return ArtifactEstimate(
        kind=kind,
        stage=MAKING_STAGE[kind],
        ref=known.ref if known else None,
        state=state,
        bytes=there if state == "complete" else size,
        new_bytes=max(0, size - there) if makes_it else 0,
    )


def _dataset(plan: RunPlan) -> list[Sample] | None:
    """The dataset's samples; None where it is missing or damaged, in which case `prepare` will make it."""
    manifest = plan.manifest("dataset")
    if manifest is None or manifest.state != "complete":
        return None
    try:
        return read_dataset(plan.store.fetch(manifest.ref))
    except DataError:
        return None


def _state_bytes(plan: RunPlan, samples: Sequence[Sample]) -> int:
    config, target = plan.config, plan.target
    layout = ShardLayout(
        resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers),
        final_layer_id(target.num_layers),
        target.hidden_size,
        config.target.dtype,
        config.capture.final_state,
    )
    return sum(layout.sample_bytes(sample) for sample in samples)


def _state_row_bytes(config: RunConfig, target: TargetInfo) -> int:
    return DTYPE_BYTES[config.target.dtype] * target.hidden_size


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a prompt file; rows that are none are counted as empty, `prepare` names them."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the prompts {file} ({error})") from error
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = {}
        rows.append(row if isinstance(row, dict) else {})
    return rows


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages")
    return [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def _user_turns(row: dict[str, Any]) -> int:
    return sum(message.get("role") == "user" for message in _messages(row))


def _prompt_tokens(row: dict[str, Any]) -> int:
    return sum(
        len(str(message.get("content") or "")) // CHARACTERS_PER_TOKEN + TEMPLATE_TOKENS_PER_MESSAGE
        for message in _messages(row)
    )
