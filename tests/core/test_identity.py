"""What each id depends on."""

from __future__ import annotations

import pytest

from eagle3_core import identity
from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import RunConfig, parse_config
from eagle3_core.errors import DataError, TargetError
from eagle3_core.target.info import TargetInfo, TensorPlace

PLACE = TensorPlace(name="w", file="model.safetensors", shape=(64, 16), dtype="F32")
TARGET = TargetInfo(
    path="/t",
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=8,
    hidden_size=16,
    vocab_size=64,
    tied_embeddings=True,
    max_position_embeddings=512,
    dtype=None,
    quantization=None,
    weights_bytes=1,
    fingerprint="f" * 32,
    tokenizer_fingerprint="e" * 32,
    embedding=PLACE,
    norm=PLACE,
    lm_head=PLACE,
    text_config={},
)
REF = ArtifactRef(kind="capture", id="0" * 16)


@pytest.fixture
def document(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"messages": []}\n')
    return {"name": "a", "target": {"model": "m"}, "data": {"prompts": [str(prompts)]}}


def ids(config: RunConfig, target: TargetInfo = TARGET, engine: str = "vllm 1.0") -> dict[str, str]:
    """Every id of a run, the dataset's content assumed."""
    conversations = identity.plan_conversations(config, target, engine)
    dataset = identity.plan_dataset(config, target, conversations.ref)
    vocabulary = identity.plan_vocabulary(config, target, dataset.ref)
    capture = identity.plan_capture(config, target, dataset.ref, "c" * 32, engine)
    checkpoint = identity.plan_checkpoint(config, target, capture.ref, vocabulary.ref)
    export = identity.plan_export(config, target, checkpoint.ref)
    plans = [
        conversations,
        dataset,
        vocabulary,
        capture,
        identity.plan_verification(config, capture.ref),
        identity.plan_labels(capture.ref, vocabulary.ref),
        checkpoint,
        export,
        identity.plan_benchmark(config, export.ref, dataset.ref, engine),
    ]
    return {plan.kind: plan.ref.id for plan in plans}


def with_value(document, key, value):
    """The document with one field, whose key is dotted, set."""
    first, _, rest = key.partition(".")
    return document | {first: with_value(document.get(first, {}), rest, value) if rest else value}


def changed(document, key, value):
    """Kinds whose id changes with one field."""
    before, after = ids(parse_config(document)), ids(parse_config(with_value(document, key, value)))
    return [kind for kind in before if before[kind] != after[kind]]


ALL = [
    "conversations", "dataset", "vocabulary", "capture", "verification", "labels", "checkpoint", "export",
    "benchmark",
]  # fmt: skip
CAPTURED = ["capture", "verification", "labels", "checkpoint", "export", "benchmark"]
TRAINED = ["checkpoint", "export", "benchmark"]
ANSWERED = [kind for kind in ALL if kind not in ("capture", "verification")]
"""What hangs on the answers, which a capture knows by their content alone."""


@pytest.mark.parametrize(
    ("key", "value", "kinds"),
    [
        ("name", "b", []),
        ("workspace", "/elsewhere", []),
        ("limits.step_retries", 5, []),
        ("train.checkpoint_every_seconds", 5.0, []),
        ("train.stall_timeout_minutes", 5.0, []),
        ("train.parallel", "ddp", []),
        ("train.num_ranks", 1, []),
        ("train.packs_per_step", 2, TRAINED),
        ("engine.max_num_seqs", 7, []),
        ("engine.max_model_len", 999, ANSWERED),
        ("benchmark.min_acceptance_length", 2.0, []),
        ("limit", 10, ANSWERED),
        ("data.heldout_fraction", 0.3, ANSWERED),
        ("data.generation.max_tokens", 7, ANSWERED),
        ("data.generation.temperature", 0.7, ANSWERED),
        ("data.generation.top_p", 0.5, []),  # greedy decoding reads neither
        ("data.generation.seed", 7, []),
        ("data.max_length", 64, [kind for kind in ANSWERED if kind != "conversations"]),
        ("data.min_trainable_tokens", 9, [kind for kind in ANSWERED if kind != "conversations"]),
        ("target.dtype", "float32", ALL),
        ("target.revision", "v2", ALL),
        (
            "target.aux_layer_ids",
            [1, 3, 6],
            CAPTURED,
        ),
        (
            "capture.final_state",
            "all",
            CAPTURED,
        ),
        ("capture.shard_bytes", 1 << 20, CAPTURED),
        ("verify.samples_per_shard", 3, ["verification"]),
        ("train.learning_rate", 1e-3, TRAINED),
        ("draft.vocab_size", 32, ["vocabulary", "labels", "checkpoint", "export", "benchmark"]),
        ("export.include_embedding", True, ["export", "benchmark"]),
        ("draft.num_layers", 2, TRAINED),
        ("benchmark.max_tokens", 9, TRAINED),  # the trainer replays what will be measured
        ("benchmark.num_prompts", 9, TRAINED),
        ("benchmark.num_speculative_tokens", 2, TRAINED),
        ("benchmark.concurrency", 2, ["benchmark"]),
    ],
)
def test_a_field_changes_the_ids_that_it_determines_and_no_other(document, key, value, kinds):
    assert changed(document, key, value) == kinds


@pytest.mark.parametrize(("field", "value"), [("temperature", 0.8), ("top_p", 0.5), ("seed", 7)])
def test_what_sampling_reads_counts_where_answers_are_sampled(document, field, value):
    sampled = with_value(document, "data.generation.temperature", 0.7)
    assert changed(sampled, f"data.generation.{field}", value) == ANSWERED


def test_the_content_of_prompts_counts_and_not_their_path(document, tmp_path):
    before = ids(parse_config(document))
    copy = tmp_path / "copy.jsonl"
    copy.write_text('{"messages": []}\n')
    assert ids(parse_config(document | {"data": {"prompts": [str(copy)]}})) == before
    copy.write_text('{"messages": [1]}\n')
    assert ids(parse_config(document | {"data": {"prompts": [str(copy)]}}))["dataset"] != before["dataset"]


@pytest.mark.parametrize("field", ["fingerprint", "tokenizer_fingerprint", "quantization"])
def test_another_target_gives_other_ids(document, field):
    other = TARGET.model_copy(update={field: "other"})
    before, after = ids(parse_config(document)), ids(parse_config(document), other)
    assert all(before[kind] != after[kind] for kind in ALL)


def test_a_target_that_was_moved_gives_an_export_that_names_its_new_place(document):
    moved = TARGET.model_copy(update={"path": "/elsewhere"})
    before, after = ids(parse_config(document)), ids(parse_config(document), moved)
    assert [kind for kind in ALL if before[kind] != after[kind]] == ["export", "benchmark"]


def test_another_engine_version_gives_other_answers_states_and_measurements(document):
    config = parse_config(document)
    before, after = ids(config), ids(config, engine="vllm 1.1")
    assert before["conversations"] != after["conversations"]
    assert before["capture"] != after["capture"]
    measured = [
        identity.plan_benchmark(config, REF, REF, version).ref for version in ("vllm 1.0", "vllm 1.1")
    ]
    assert measured[0] != measured[1]


def test_equal_content_gives_the_same_capture_whatever_made_it(document):
    config = parse_config(document)
    other = ArtifactRef(kind="dataset", id="1" * 16)
    first = identity.plan_capture(config, TARGET, REF, "c" * 32, "e")
    second = identity.plan_capture(config, TARGET, other, "c" * 32, "e")
    assert first.ref == second.ref
    assert second.parents == {"dataset": other}
    assert identity.plan_capture(config, TARGET, REF, "d" * 32, "e").ref != first.ref


def test_a_raised_step_version_gives_a_new_id(document, monkeypatch):
    before = ids(parse_config(document))
    monkeypatch.setitem(identity.STEP_VERSION, "checkpoint", identity.STEP_VERSION["checkpoint"] + 1)
    after = ids(parse_config(document))
    assert [kind for kind in ALL if before[kind] != after[kind]] == ["checkpoint", "export", "benchmark"]


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(document):
    config = parse_config(document | {"draft": {"vocab_size": 65}})
    with pytest.raises(DataError, match=r"draft\.vocab_size is 65; expected at most the target's 64"):
        identity.draft_vocab_size(config, TARGET)


def test_a_missing_prompt_file_is_refused(document):
    config = parse_config(document | {"data": {"prompts": ["/nowhere.jsonl"]}})
    with pytest.raises(DataError, match=r"/nowhere\.jsonl, which is not a file"):
        identity.prompt_files(config)


def test_layer_ids_that_cannot_be_captured_are_refused(document):
    config = parse_config(document | {"target": {"model": "m", "aux_layer_ids": [1, 1, 3]}})
    with pytest.raises(TargetError, match="3 distinct, increasing ids from 0 to 7"):
        identity.plan_capture(config, TARGET, REF, "c", "e")
