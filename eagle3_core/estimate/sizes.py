"""Bytes of every artifact: to the byte for captured states, closely for the rest.

The small ones were measured: bytes a token of conversations and datasets, a step of training's metrics, a
shard's entry in a manifest.
"""

from __future__ import annotations

from typing import NamedTuple

from eagle3_core.artifacts import ArtifactKind
from eagle3_core.config import RunConfig
from eagle3_core.estimate.workload import Load, Workload
from eagle3_core.identity import draft_vocab_size, resolve_aux_layer_ids
from eagle3_core.store.shards import DTYPE_BYTES, ShardLayout, plan_shards, shard_file_bytes
from eagle3_core.target.info import TargetInfo
from eagle3_core.target.layers import final_layer_id

MANIFEST_BYTES = 1500
CONVERSATION_BYTES_PER_TOKEN = 11.3
DATASET_BYTES_PER_TOKEN = 1.6
DATASET_BYTES_PER_SAMPLE = 24
ENTRY_BYTES = 330
"""Of a shard in the manifest of its capture."""
SHARD_BYTES_PER_SAMPLE, SHARD_BYTES_PER_TOKEN, SHARD_BYTES_PER_ROW = 52, 5, 8
"""Beside states, where samples are not known: offsets, hash and key of each; id and mask; number of a row."""
LABEL_BYTES, LABEL_BYTES_PER_SAMPLE, LABEL_ENTRY_BYTES = 8, 24, 750
"""Of labels: id and share of each; offset and hash of a sample; header and entry of a shard's file."""
STEP_BYTES, STEP_SAMPLE_BYTES, EVALUATION_BYTES = 510, 20, 1500
STEP_BYTES_PER_TTT_STEP = 42
EVENT_BYTES, EVENT_STEP_BYTES = 310, 100
"""Of an optimizer step in TensorBoard's files, and of each TTT step in it."""
BENCHMARK_BYTES_PER_PROMPT, BENCHMARK_BYTES_PER_TOKEN = 330, 14
DRAFT_CONFIG_BYTES = 2000
MOMENTS = 2
"""AdamW keeps two numbers for each parameter."""
RESUMABLE_BESIDE_BYTES = 20_000
"""Names, records and position in a resumable checkpoint."""
EXPORT_ELEMENT_BYTES = 2


class Size(NamedTuple):
    """Bytes of an artifact's folder when it is finished, and at most while it is made."""

    final: int
    peak: int


def artifact_sizes(config: RunConfig, target: TargetInfo, load: Load) -> dict[ArtifactKind, Size]:
    """Sizes by kind, manifests counted."""
    work = load.workload
    trained, kept = draft_parameters(config, target)
    mapping = 8 * draft_vocab_size(config, target) + target.vocab_size
    embedding = target.vocab_size * target.hidden_size if config.export.include_embedding else 0
    conversations = round(CONVERSATION_BYTES_PER_TOKEN * work.num_tokens) + MANIFEST_BYTES
    dataset = round(DATASET_BYTES_PER_TOKEN * work.num_tokens) + DATASET_BYTES_PER_SAMPLE * work.num_samples
    export = EXPORT_ELEMENT_BYTES * (trained + kept + embedding) + mapping + DRAFT_CONFIG_BYTES
    prompts = work.num_benchmark_prompts(config.benchmark.num_prompts)
    answer = config.benchmark.max_tokens
    benchmark = prompts * (BENCHMARK_BYTES_PER_PROMPT + BENCHMARK_BYTES_PER_TOKEN * answer)
    sizes: dict[ArtifactKind, Size] = {
        "conversations": Size(conversations, 2 * conversations),
        "dataset": _same(dataset + 2 * MANIFEST_BYTES),
        "vocabulary": _same(mapping + MANIFEST_BYTES),
        "capture": _same(capture_bytes(config, target, load)),
        "verification": _same(2 * MANIFEST_BYTES),
        "labels": _same(label_bytes(config, target, load)),
        "checkpoint": _checkpoint(config, trained, kept, mapping, work),
        "export": _same(len(config.export.engines) * export + MANIFEST_BYTES),
        "benchmark": _same(benchmark + 2 * MANIFEST_BYTES),
    }
    if config.data.capture is not None:
        del sizes["conversations"]
    return sizes


def capture_bytes(config: RunConfig, target: TargetInfo, load: Load) -> int:
    """All shards and the manifest; to the byte for the shards where the samples are known."""
    layout, work = state_layout(config, target), load.workload
    if load.samples is not None:
        shards = plan_shards(load.samples, layout, int(config.capture.shard_bytes))
        files = [shard_file_bytes(load.samples[shard.start : shard.end], layout) for shard in shards]
        return sum(files) + len(files) * ENTRY_BYTES + MANIFEST_BYTES
    states = state_bytes(config, target, load)
    rows = work.num_tokens if config.capture.final_state == "all" else work.num_answer_tokens
    beside = SHARD_BYTES_PER_SAMPLE * work.num_samples + SHARD_BYTES_PER_TOKEN * work.num_tokens
    num_shards = 1 + states // int(config.capture.shard_bytes)
    return states + beside + SHARD_BYTES_PER_ROW * rows + num_shards * 4 * ENTRY_BYTES + MANIFEST_BYTES


def label_bytes(config: RunConfig, target: TargetInfo, load: Load) -> int:
    """Labels of all shards and their manifest."""
    work = load.workload
    num_shards = 1 + state_bytes(config, target, load) // int(config.capture.shard_bytes)
    labels = LABEL_BYTES * work.num_answer_tokens + LABEL_BYTES_PER_SAMPLE * work.num_samples
    return labels + num_shards * LABEL_ENTRY_BYTES + MANIFEST_BYTES


def state_bytes(config: RunConfig, target: TargetInfo, load: Load) -> int:
    """Element size x H x (A x tokens + final rows): exact where the samples are known."""
    layout, work = state_layout(config, target), load.workload
    if load.samples is not None:
        return sum(map(layout.sample_bytes, load.samples))
    final = work.num_tokens if config.capture.final_state == "all" else work.num_answer_tokens
    rows = len(layout.aux_layer_ids) * work.num_tokens + final
    return DTYPE_BYTES[layout.dtype] * layout.hidden_size * rows


def state_layout(config: RunConfig, target: TargetInfo) -> ShardLayout:
    """What the shards of a run hold."""
    return ShardLayout(
        resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers),
        final_layer_id(target.num_layers),
        target.hidden_size,
        config.target.dtype,
        config.capture.final_state,
    )


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


def num_optimizer_steps(config: RunConfig, work: Workload) -> int:
    """Steps of a whole training, if every pack is full."""
    tokens = config.train.pack_tokens * config.train.packs_per_step
    return config.train.num_epochs * max(1, -(-work.num_tokens // tokens))


def event_file_bytes(config: RunConfig, work: Workload) -> int:
    """TensorBoard's files of a training, which lie in the run's folder."""
    train = config.train
    if not train.tensorboard:
        return 0
    return num_optimizer_steps(config, work) * (EVENT_BYTES + EVENT_STEP_BYTES * train.ttt_steps)


def _checkpoint(config: RunConfig, trained: int, kept: int, mapping: int, work: Workload) -> Size:
    """The finished draft, or all that lies there when a checkpoint is written over the last ones.

    Each of the `keep_last` checkpoints names `keep_best` files of weights, of which an evaluation replaces
    one at most; so with the next checkpoint and its new best weights there are `keep_last + keep_best`.
    """
    train, steps = config.train, num_optimizer_steps(config, work)
    per_step = STEP_BYTES + STEP_BYTES_PER_TTT_STEP * train.ttt_steps
    looks = train.num_epochs + (steps // train.evaluate_every_steps if train.evaluate_every_steps else 0)
    samples = train.num_epochs * work.num_samples * STEP_SAMPLE_BYTES
    metrics = steps * per_step + samples + looks * EVALUATION_BYTES
    beside = metrics + DRAFT_CONFIG_BYTES + MANIFEST_BYTES + looks * EVALUATION_BYTES
    weights, finished = 4 * trained, 4 * (trained + kept) + mapping + beside
    final = finished + (min(train.keep_best, looks) - 1) * weights
    resumable = weights * (1 + MOMENTS) + RESUMABLE_BESIDE_BYTES + looks * EVALUATION_BYTES
    best = min(train.keep_last + train.keep_best, looks) * weights
    while_saving = (train.keep_last + 1) * resumable + best + metrics
    while_finishing = train.keep_last * resumable + best + finished
    return Size(final, max(final, while_saving, while_finishing))


def _same(size: int) -> Size:
    return Size(size, size)
