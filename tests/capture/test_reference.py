"""The reference against transformers' own hidden states, alone and in batches, for several architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from eagle3_core.capture.job import CaptureJob, capture_layout
from eagle3_core.capture.miniature import Miniature, make_miniature
from eagle3_core.capture.miniature_config import miniature_config
from eagle3_core.capture.reference import ReferenceModel, capture_with_reference
from eagle3_core.capture.reference_batch import Batching
from eagle3_core.errors import CaptureError
from eagle3_core.store.shards import CapturedSample, ShardReader, plan_shards
from eagle3_core.target.info import inspect_target
from eagle3_core.target.weights import FinalHead
from tests.capture.runs import make_samples, run_config
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

CONFIGS = Path(__file__).parents[2] / "eagle3_core" / "capture" / "architectures"
ARCHITECTURES = ("llama", "qwen3", "qwen3-moe", "gemma-3", "gpt-oss", "deepseek-v3", "kimi-k2.5")
LENGTHS = (37, 1, 64, 2, 21)


def sequences(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (length,), generator=generator) for length in LENGTHS]


def difference(states: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((states - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Miniature, ReferenceModel]:
    config = json.loads((CONFIGS / f"{request.param}.json").read_text())
    made = make_miniature(miniature_config(config), tmp_path_factory.mktemp(request.param))
    return made, ReferenceModel(inspect_target(made.folder), "float32")


def test_each_capture_id_is_the_entry_of_transformers_hidden_states_that_the_docs_promise(
    loaded: tuple[Miniature, ReferenceModel],
) -> None:
    made, model = loaded
    plain = AutoModelForCausalLM.from_pretrained(made.text_folder, dtype=torch.float32).eval()
    ids = sequences(plain.config.get_text_config().vocab_size)[0]
    with torch.inference_mode():
        output = plain(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    states, logits = model.forward(ids, range(model.num_layers + 1))
    for k in range(model.num_layers):
        torch.testing.assert_close(states[:, k], output.hidden_states[k][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, output.logits[0], atol=1e-4, rtol=1e-4)
    final, after_norm = states[:, model.num_layers], output.hidden_states[-1][0]
    assert not torch.allclose(final, after_norm, atol=1e-2)
    norm = next(m for n, m in plain.named_modules() if n.endswith("model.norm") or n == "norm")
    torch.testing.assert_close(norm(final), after_norm, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_batches_give_what_single_sequences_give(
    loaded: tuple[Miniature, ReferenceModel], batching: Batching
) -> None:
    _, model = loaded
    given = sequences(model.info.vocab_size)
    ids = (0, 1, model.num_layers)
    found = model.forward_batch(given, ids, batching)
    for tokens, (states, logits) in zip(given, found, strict=True):
        alone, own_logits = model.forward(tokens, ids)
        assert states.shape == (len(tokens), 3, model.info.hidden_size)
        assert difference(states, alone) < 1e-5
        assert torch.equal(logits.argmax(-1), own_logits.argmax(-1))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_kinds_of_attention_keep_packed_sequences_apart(tmp_path: Path, attention: str) -> None:
    model = ReferenceModel(inspect_target(make_tiny_target(tmp_path, num_layers=3)), "float32")
    model._model.set_attn_implementation(attention)
    given = sequences(500)
    found = model.forward_batch(given, (3,), "packed")
    for tokens, (states, _) in zip(given, found, strict=True):
        torch.testing.assert_close(states, model.forward(tokens, (3,))[0], atol=1e-5, rtol=1e-5)


def test_a_target_whose_results_would_depend_on_the_batch_is_refused(tmp_path: Path) -> None:
    info = inspect_target(make_tiny_target(tmp_path, num_layers=3))
    model = ReferenceModel(info, "float32")
    rope = info.rope[0].model_copy(update={"kind": "longrope"})
    model.info = info.model_copy(update={"rope": (rope,)})
    with pytest.raises(CaptureError, match=r"RoPE of the kind longrope.*reference_batching to single"):
        model.forward_batch(sequences(500), (3,), "padded")
    assert info.attention is not None
    kinds = info.attention.model_copy(update={"layer_kinds": {"linear_attention": 2, "full_attention": 1}})
    model.info = info.model_copy(update={"attention": kinds})
    with pytest.raises(CaptureError, match=r"layers of linear_attention.*single or padded"):
        model.forward_batch(sequences(500), (3,), "packed")


def test_a_model_that_does_not_keep_packed_sequences_apart_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ReferenceModel(inspect_target(make_tiny_target(tmp_path, num_layers=3)), "float32")
    whole = model._model.forward

    def without_positions(position_ids: torch.Tensor | None = None, **inputs: Any) -> Any:
        return whole(**inputs)

    monkeypatch.setattr(model._model, "forward", without_positions)
    with pytest.raises(CaptureError, match=r"does not keep packed sequences apart.*to padded or single"):
        model.forward_batch(sequences(500), (3,), "packed")


def captured(
    folder: Path, target: Path, batching: Batching, alone: tuple[str, ...] = ()
) -> list[CapturedSample]:
    config = run_config(
        folder,
        target,
        capture={"reference_batching": batching, "final_state": "all", "max_batched_tokens": 96},
    )
    info = inspect_target(target)
    samples, layout = make_samples([40, 9, 100, 30, 12, 5]), capture_layout(config, info)
    shards = tuple(plan_shards(samples, layout, 128 * layout.sample_bytes(samples[5]) // 5))
    job = CaptureJob(
        engine="reference-1", dataset_folder="", folder=str(folder), layout=layout, shards=shards, alone=alone
    )
    counted: list[int] = []
    done = [shard for shard, _ in capture_with_reference(config, info, job, samples, counted.append)]
    assert done == list(shards)
    assert len(shards) > 1
    assert (counted[0], sum(counted)) == (0, 196)
    assert job.journal.in_flight() == []
    return [sample for shard in shards for sample in ShardReader(folder / shard.file_name)]


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_a_capture_in_batches_stores_what_one_sample_at_a_time_stores(
    tmp_path: Path, batching: Batching
) -> None:
    target = make_tiny_target(tmp_path / "target")
    one_by_one = captured(tmp_path / "single", target, "single")
    in_batches = captured(tmp_path / batching, target, batching, alone=("sample-001",))
    for ours, theirs in zip(in_batches, one_by_one, strict=True):
        assert ours.key == theirs.key
        assert difference(ours.aux_states, theirs.aux_states) < 1e-5
        assert difference(ours.final_states, theirs.final_states) < 1e-5


def test_the_stored_final_state_is_before_the_final_norm_and_says_so(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target")
    info = inspect_target(target)
    stored = captured(tmp_path / "single", target, "single")
    head, model = FinalHead(info), ReferenceModel(info, "float32")
    for sample in stored:
        _, logits = model.forward(sample.input_ids, ())
        rebuilt = head.final_logits(sample.final_states)
        assert torch.equal(rebuilt.argmax(-1), logits.argmax(-1))
        assert (rebuilt - logits).abs().max() < 1e-4
    with safe_open(next((tmp_path / "single").glob("*.safetensors")), framework="pt") as shard:
        description = json.loads(shard.metadata()["eagle3_shard"])
    assert description["final_state_norm"] == "before the final norm"
