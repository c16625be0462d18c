"""What `eagle3 target inspect` prints."""

from __future__ import annotations

import json

import pytest

from eagle3_core.errors import EXIT_OK, EXIT_USER_ERROR
from flows.cli import main
from tests.target.files import LLAMA, LLAMA_FILES, write_sharded
from tests.target.hub_server import serve_hub

pytestmark = pytest.mark.orchestrator


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config = LLAMA | {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32},
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    folder = write_sharded(tmp_path / "org" / "model", config, LLAMA_FILES)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 11}}}))
    return folder


def inspect(capsys, *arguments):
    assert main(["target", "inspect", *map(str, arguments)]) == EXIT_OK
    return capsys.readouterr().out


def test_every_fact_is_shown_in_words(target, capsys):
    shown = inspect(capsys, target)
    for words in (
        "LlamaForCausalLM, llama",
        "12 token ids, 4 padded rows, 16 rows",
        "llama3, theta 10000, factor 8, 32 original positions",
        "gqa, 4 heads, 2 of keys and values, head size 2",
        "4, 2 for each token, 0 shared",
        "gptq, 4 bits, groups of 128",
        "lm_head.weight, F32 [16, 8], in model-00003-of-00003.safetensors",
        "2, 4, 5",
    ):
        assert words in shown


def test_missing_files_are_shown(target, capsys):
    (target / "model-00002-of-00003.safetensors").unlink()
    shown = inspect(capsys, target)
    assert "not known while files are missing" in shown
    assert "model-00002-of-00003.safetensors" in shown
    assert "1 of the weight files that its index names is missing" in shown


def test_the_same_facts_come_as_json(target, capsys):
    facts = json.loads(inspect(capsys, target, "--json"))
    assert (facts["num_layers"], facts["padded_rows"], facts["note"]) == (8, 4, None)
    assert facts["rope"][0]["kind"] == "llama3"
    assert facts["quantization_facts"]["group_size"] == 128


def test_a_hub_id_is_looked_up_at_a_revision_and_a_run_is_said_to_need_it_here(
    target, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serve_hub(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        shown = inspect(capsys, "org/model", "--revision", "main")
        assert "read from the hub: a run needs the target on this machine (`hf download`)" in shown
        assert "headers:" in shown
        assert main(["target", "inspect", "org/model", "--revision", "v9"]) == EXIT_USER_ERROR
    assert capsys.readouterr().err.count("\n") == 1
