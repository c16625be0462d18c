"""Drafts in the real vLLM: what is accepted is known by hand, and what would mislead is refused."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import parse_config
from eagle3_core.contracts import BenchmarkResult
from eagle3_core.errors import BenchmarkError, ExportError, StoreError
from eagle3_core.serving import benchmark, decoding, export
from eagle3_core.serving.acceptance import acceptance_figures, text_passes
from eagle3_core.serving.decoding import Decoded, DecodingEngine, EngineCounters
from eagle3_core.serving.measurement import Runs, decode_with_and_without
from eagle3_core.store.dataset import read_dataset
from tests.serving.drafts import (
    END_TOKEN,
    Factory,
    continuation,
    cycle_options,
    cycle_weights,
    draft_config,
    identity_vocabulary,
    make_cycle_target,
    make_factory,
    scattered_vocabulary,
    silent,
    untrained_weights,
)
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

K = 3
MAX_TOKENS = 17


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Factory:
    folder = tmp_path_factory.mktemp("cycle")
    return make_factory(folder, make_cycle_target(folder / "target"), max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module")
def half_export(factory: Factory) -> ArtifactRef:
    """The cycle draft with half of the target's vocabulary."""
    mapping = scattered_vocabulary(factory.target, 250)
    return _export(factory, "half", mapping, **cycle_options())


@pytest.fixture(scope="module")
def measured(factory: Factory, half_export: ArtifactRef) -> tuple[BenchmarkResult, list[dict[str, Any]], Any]:
    spec = factory.benchmark_spec(half_export, benchmark={"measure_speed": True})
    result = benchmark.run(spec, silent())
    manifest = factory.store.read(spec.outputs["benchmark"].ref)
    lines = (factory.store.folder(manifest.ref) / "outputs.jsonl").read_text().splitlines()
    return result, [json.loads(line) for line in lines], manifest


def test_vllm_accepts_exactly_the_tokens_that_the_draft_vocabulary_reaches(
    factory: Factory, measured: Any
) -> None:
    kept = scattered_vocabulary(factory.target, 250)["t2d"].tolist()
    _, rows, _ = measured
    starts = {sample.key: sample.input_ids[sample.prompt_length - 1] for sample in _samples(factory)}

    for row in rows:
        answer, accepted = _by_hand(int(starts[row["key"]]), kept)
        assert row["without_draft"] == answer
        assert row["with_draft"] == answer
        assert row["accepted"] == accepted


def test_an_engine_without_records_is_watched_pass_by_pass(
    factory: Factory, half_export: ArtifactRef, measured: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = scattered_vocabulary(factory.target, 250)["t2d"].tolist()
    monkeypatch.setattr(decoding, "records_passes", lambda: False)
    folder = factory.store.folder(half_export) / "vllm"
    prompts = [sample.input_ids[: sample.prompt_length].tolist() for sample in _samples(factory)]

    runs = decode_with_and_without(factory.config, factory.target.path, folder, prompts, silent())

    by_hand = [_by_hand(int(prompt[-1]), kept) for prompt in prompts]
    assert [one.token_ids for one in runs.draft] == [answer for answer, _ in by_hand]
    assert [one.accepted[:-1] for one in runs.draft] == [accepted[:-1] for _, accepted in by_hand]
    for one, (answer, accepted) in zip(runs.draft, by_hand, strict=True):
        in_last = len(answer) - 1 - sum(count + 1 for count in accepted[:-1])
        assert (one.accepted[-1], one.drafted[-1], one.num_unseen) == (
            in_last - 1,
            in_last - 1,
            K + 1 - in_last,
        )
    figures, recorded = acceptance_figures(runs.passes(), K), measured[0].acceptance
    assert figures.acceptance_length == recorded.acceptance_length
    assert (figures.num_passes, figures.num_samples) == (recorded.num_passes, recorded.num_samples)


@pytest.mark.parametrize(
    ("device", "chosen", "found"),
    [("cpu", None, "AVX512_CORE_BF16"), ("cpu", "ALL", "ALL"), ("cuda", None, None)],
)
def test_products_on_the_cpu_do_not_round_by_the_number_of_their_rows(
    factory: Factory, monkeypatch: pytest.MonkeyPatch, device: str, chosen: str | None, found: str | None
) -> None:
    variable = "ONEDNN_MAX_CPU_ISA"
    monkeypatch.setenv(variable, chosen or "")
    if chosen is None:
        monkeypatch.delenv(variable)
    told: list[str | None] = []
    monkeypatch.setattr(decoding, "load_vllm", lambda *_, **__: told.append(os.environ.get(variable)))
    engine = factory.config.engine.model_copy(update={"device": device})

    with DecodingEngine(factory.config.model_copy(update={"engine": engine}), factory.target.path):
        assert told == [found]


@pytest.mark.parametrize(
    ("drafts", "accepted", "is_sound"),
    [(3, 3, True), (3, 5, True), (3, 2, False), (3, 6, False), (2, 3, False), (4, 3, False)],
)
def test_totals_of_an_engine_are_held_against_what_was_seen_of_the_answers(
    drafts: int, accepted: int, is_sound: bool
) -> None:
    answers = [
        Decoded([1, 2, 3, 4, 5, 6], [3, 0], [3, 0], 1.0, num_unseen=2), Decoded([1, 2], [3], [0], 1.0)
    ]  # fmt: skip
    runs = Runs(answers, answers, EngineCounters(drafts, accepted), None, None)

    if is_sound:
        assert [len(passes) for passes in runs.passes()] == [2, 1]
    else:
        with pytest.raises(BenchmarkError, match="expected 3 and 3 to 5, the sum over the answers"):
            runs.passes()


@pytest.mark.parametrize(
    ("preemptions", "remedy"), [(0, "report the engine's version"), (1, "lower benchmark")]
)
def test_passes_without_proposals_of_answers_that_were_put_back_are_named(
    preemptions: int, remedy: str
) -> None:
    answers = [Decoded([1, 2, 3], [3, 0], [0, 0], 1.0, num_unseen=3)]
    runs = Runs(answers, answers, EngineCounters(1, 0, preemptions=preemptions), None, None)

    with pytest.raises(BenchmarkError, match=remedy):
        runs.passes()


def test_figures_count_the_text_and_not_what_the_engine_accepted_behind_its_end(measured: Any) -> None:
    result, rows, manifest = measured
    tokens = sum(len(row["with_draft"]) - 1 for row in rows)
    passes = sum(len(row["accepted"]) for row in rows)
    counted = manifest.facts["engine_counters"]

    assert result.acceptance.acceptance_length == pytest.approx(tokens / passes)
    assert (result.acceptance.num_passes, result.acceptance.num_samples) == (passes, 12)
    assert counted["drafts"] == passes, "the warm-up is not counted"
    assert 1 + counted["accepted"] / passes > result.acceptance.acceptance_length + 0.02


def test_the_result_says_what_was_measured_on_what(factory: Factory, measured: Any) -> None:
    result, _, manifest = measured

    assert result.lossless == "identical"
    assert result.engine.startswith("vllm")
    assert (result.num_prompts, result.max_tokens, result.acceptance.num_speculative_tokens) == (12, 17, 3)
    assert len(result.dataset_hash) == 32
    assert result.speed_ratio == pytest.approx(
        result.draft_tokens_per_second / result.baseline_tokens_per_second
    )
    assert BenchmarkResult.model_validate(manifest.facts["result"]) == result


def test_a_draft_that_always_agrees_produces_k_plus_one_tokens_a_pass(factory: Factory) -> None:
    """With the whole vocabulary and its own copy of the embedding; vLLM holds exactly what was exported."""
    ref = _export(
        factory, "oracle", identity_vocabulary(factory.target), include_embedding=True, **cycle_options()
    )
    folder = factory.store.folder(ref) / "vllm"
    prompts = [sample.input_ids[: sample.prompt_length].tolist() for sample in _samples(factory)]

    with DecodingEngine(factory.config, factory.target.path, folder) as engine:
        answers = engine.decode(prompts, MAX_TOKENS)
        loaded = _draft_parameters(engine)
        aux_ids = engine.llm.apply_model(lambda model: tuple(model.model.aux_hidden_state_layers))[0]

    assert all(count == K for answer in answers for count in answer.accepted)
    passes = [text_passes(one.drafted, one.accepted, len(one.token_ids)) for one in answers]
    assert acceptance_figures(passes, K).conditional == [1.0] * K
    endless = [group for group, one in zip(passes, answers, strict=True) if one.token_ids[-1] != END_TOKEN]
    assert len(endless) == 6
    assert acceptance_figures(endless, K).acceptance_length == K + 1
    assert aux_ids == (1, 2, 3)
    _assert_holds(loaded, load_file(folder / "model.safetensors"))


def test_an_untrained_draft_is_near_one_lossless_and_below_the_limit(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("untrained")
    target = make_tiny_target(folder / "target", num_layers=4)
    factory = make_factory(folder, target, min_acceptance_length=1.4)
    mapping = scattered_vocabulary(factory.target, 250)
    options = {"fc_norm": True, "norm_output": True, "num_hidden_layers": 2}
    ref = _export(factory, "untrained", mapping, trained=False, **options)
    spec = factory.benchmark_spec(ref, target={"dtype": "float32"})

    with pytest.raises(BenchmarkError, match=r"acceptance length is 1\.\d+ .* at least .* 1\.4"):
        benchmark.run(spec, silent())

    result = BenchmarkResult.model_validate(factory.store.read(spec.outputs["benchmark"].ref).facts["result"])
    assert 1.0 <= result.acceptance.acceptance_length < 1.15
    assert result.lossless in ("identical", "ties")
    assert result.speed_ratio is None


def test_an_export_without_its_files_fails_before_an_engine_starts(
    factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_engines(monkeypatch)
    ref = _export(factory, "emptied", scattered_vocabulary(factory.target, 64))
    for path in (factory.store.folder(ref) / "vllm").iterdir():
        path.unlink()

    with pytest.raises(BenchmarkError, match=r"is damaged: .*config\.json is missing"):
        benchmark.run(factory.benchmark_spec(ref), silent())


def test_an_export_that_was_never_made_fails_before_an_engine_starts(
    factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_engines(monkeypatch)

    with pytest.raises(StoreError, match="is not in"):
        benchmark.run(factory.benchmark_spec(ArtifactRef(kind="export", id="0" * 16)), silent())


def test_an_export_for_other_layers_fails_before_an_engine_starts(
    factory: Factory, half_export: ArtifactRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse_engines(monkeypatch)
    other = {"aux_layer_ids": [0, 1, 2]}

    with pytest.raises(ExportError, match=r"is \(1, 2, 3\) instead of \(0, 1, 2\)"):
        benchmark.run(factory.benchmark_spec(half_export, target=other), silent())


def test_prompts_that_do_not_fit_are_left_out_by_name(factory: Factory) -> None:
    document = factory.config.model_dump(mode="json")
    document["engine"]["max_model_len"] = 32
    document["benchmark"]["max_tokens"] = 32 - 3 * K - 3

    chosen, skipped = benchmark.choose_prompts(_samples(factory), parse_config(document))

    assert [len(sample.input_ids) - 1 for sample in chosen] == [2, 3] * 4
    assert [one.key for one in skipped] == ["prompt-2", "prompt-5", "prompt-8", "prompt-11"]
    assert skipped[0].reason == "needs 33 tokens, engine.max_model_len is 32"


def test_a_prompt_that_just_fits_takes_no_proposals_from_the_others(factory: Factory) -> None:
    ref = _export(factory, "near_end", identity_vocabulary(factory.target), **cycle_options())
    document = factory.config.model_dump(mode="json")
    document["engine"]["max_model_len"] = 38
    for tokens in range(20, 38):  # to the longest answers for which all have room
        config = parse_config(document | {"benchmark": document["benchmark"] | {"max_tokens": tokens}})
        if benchmark.choose_prompts(_samples(factory), config)[1]:
            break
        fitting = config
    prompts = [sample.input_ids[: sample.prompt_length].tolist() for sample in _samples(factory)]

    with DecodingEngine(fitting, factory.target.path, factory.store.folder(ref) / "vllm") as engine:
        answers = engine.decode(prompts, fitting.benchmark.max_tokens)

    assert all(count == K for answer in answers for count in answer.accepted)


def test_no_prompt_at_all_is_an_error(factory: Factory) -> None:
    with pytest.raises(BenchmarkError, match="no held-out prompt to decode: 0 found"):
        benchmark.choose_prompts([], factory.config)


def _by_hand(start: int, kept: list[bool]) -> tuple[list[int], list[int]]:
    """The answer, and the drafts that each pass accepts, those behind the answer's end included."""
    chain = continuation(start, MAX_TOKENS + K)
    length = min(chain.index(END_TOKEN) + 1 if END_TOKEN in chain else MAX_TOKENS, MAX_TOKENS)
    position, accepted = 1, []
    while position < length:
        drafts = chain[position : position + K]
        agreed = next((i for i, token in enumerate(drafts) if not kept[token]), K)
        accepted.append(agreed)
        position += agreed + 1
    return chain[:length], accepted


def _export(
    factory: Factory,
    name: str,
    mapping: dict[str, torch.Tensor],
    *,
    trained: bool = True,
    include_embedding: bool = False,
    **options: Any,
) -> ArtifactRef:
    config = draft_config(factory.target, len(mapping["d2t"]), **options)
    make = cycle_weights if trained and options else untrained_weights
    checkpoint = factory.add_checkpoint(config, make(config, factory.target, mapping["t2d"]), mapping, name)
    spec = factory.export_spec(checkpoint, export={"include_embedding": include_embedding})
    export.run(spec, silent())
    return spec.outputs["export"].ref


def _samples(factory: Factory) -> list[Any]:
    return read_dataset(factory.store.folder(factory.dataset))


def _refuse_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(benchmark, "decode_with_and_without", refuse)


def _draft_parameters(engine: DecodingEngine) -> dict[str, torch.Tensor]:
    """Parameters of the draft inside the running engine, under vLLM's names."""
    core: Any = engine.llm.llm_engine.engine_core
    runner = core.engine_core.model_executor.driver_worker.worker.model_runner
    return {name: tensor.detach().clone() for name, tensor in runner.drafter.model.named_parameters()}


def _assert_holds(loaded: dict[str, torch.Tensor], exported: dict[str, torch.Tensor]) -> None:
    """Every exported tensor has its place in the engine, and the engine has no parameter beyond them.

    On a CPU the engine packs matrices and leaves their parameters empty: those show in what is accepted.
    """
    layer = "layers.0."
    stacked = {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
    expected = dict(exported)
    for name, parts in stacked.items():
        weights = [expected.pop(f"{layer}{part}.weight") for part in parts]
        expected[f"{layer}{name}.weight"] = torch.cat(weights)
    found = {name.removeprefix("model."): tensor for name, tensor in loaded.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected if found[name].numel())
