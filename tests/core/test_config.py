"""Profiles and overrides: what is accepted, and what one line says about the rest."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from eagle3_core.config import (
    PROJECT_ROOT,
    STAGES,
    RunConfig,
    find_profile,
    load_profile,
    parse_config,
    parse_stages,
    resolve_path,
)
from eagle3_core.errors import ConfigError, DataError
from eagle3_core.identity import prompt_files
from eagle3_core.overrides import Override

MINIMAL = {"name": "a", "target": {"model": "m"}}


def refusal(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL | changes, source="profile.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_key_is_named_with_its_section():
    assert refusal(train={"epochs": 3}).startswith("profile.yaml: unknown key train.epochs, ")
    assert "unknown key train.zzz; " in refusal(train={"zzz": 3})


def test_a_key_that_is_nearly_one_is_told_which():
    assert "unknown key train.num_epoch, perhaps num_epochs is meant" in refusal(train={"num_epoch": 3})
    assert "data.generation.top, perhaps top_p is meant" in refusal(data={"generation": {"top": 1}})
    assert "unknown key trian, perhaps train is meant" in refusal(trian={})


def test_a_single_source_of_prompts_needs_no_list():
    config = parse_config(MINIMAL | {"data": {"prompts": "a.jsonl"}})
    assert config == parse_config(MINIMAL | {"data": {"prompts": ["a.jsonl"]}})


def test_a_wrong_type_says_what_was_found():
    assert "train.num_epochs: Input should be a valid integer" in refusal(train={"num_epochs": "x"})
    assert "(found 'x')" in refusal(train={"num_epochs": "x"})


def test_a_value_out_of_range_is_refused():
    assert "data.max_length" in refusal(data={"max_length": 2})
    assert "train.betas.1" in refusal(train={"betas": [0.9, 1.0]})


def test_every_wrong_field_is_listed_at_once():
    text = refusal(train={"num_epochs": 0}, draft={"vocab_size": 1}, nonsense=1)
    assert all(part in text for part in ("train.num_epochs", "draft.vocab_size", "unknown key nonsense"))


def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match=r"target\.model is missing"):
        parse_config({"name": "a", "target": {}})


def test_settings_that_exclude_each_other_are_refused():
    assert "norm_before_fc and fc_norm exclude each other" in refusal(
        draft={"norm_before_fc": True, "fc_norm": True}
    )
    text = refusal(train={"num_ranks": 2, "ttt_steps": 3})
    assert text.startswith("profile.yaml: train: num_ranks is 2, but")
    assert "found" not in text


def test_byte_sizes_are_read_with_their_unit():
    config = parse_config(MINIMAL | {"capture": {"shard_bytes": "32MiB"}})
    assert config.capture.shard_bytes == 32 << 20


def test_a_configuration_cannot_be_changed():
    config = parse_config(MINIMAL)
    with pytest.raises(ValidationError):
        config.name = "b"


def test_a_configuration_survives_json():
    config = load_profile("smollm2-135m-demo")
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_overrides_reach_nested_fields_with_their_type():
    config = load_profile("smollm2-135m-demo", ["train.num_epochs=2", "limit=10", "target.revision=null"])
    assert (config.train.num_epochs, config.limit, config.target.revision) == (2, 10, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.num_epochs", "expected `section.field=value`"),
        ("=3", "expected `section.field=value`"),
        ("name.x=3", "name is not a section"),
        ("train.nothing=3", "unknown key train.nothing"),
    ],
)
def test_a_bad_override_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        load_profile("smollm2-135m-demo", [override])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: a\nlimit: b: 3\n", "line 2, column 9: mapping values are not allowed here"),
        ("name: 'a\nlimit: 3\n", "line 3, column 1: found unexpected end of stream (while scanning a quoted "
         "scalar that begins in line 1)"),
        ("name: \0\n", "special characters are not allowed"),
    ],
)  # fmt: skip
def test_a_profile_that_is_not_yaml_is_refused_with_file_and_line(tmp_path, text, problem):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert str(caught.value) == f"the profile {path} is not YAML: {problem}"


def test_a_list_of_prompt_files_without_brackets_is_told_how_to_write_it():
    config = load_profile("smollm2-135m-demo", ["data.prompts=mine.jsonl,one.jsonl"])
    with pytest.raises(DataError, match=r"as a list: data\.prompts=\[mine\.jsonl,one\.jsonl\]$"):
        prompt_files(config)


def refused(tmp_path, text, *overrides) -> str:
    path = tmp_path / "p.yaml"
    path.write_text(f"name: a\ntarget: {{model: m}}\n{text}")
    with pytest.raises(ConfigError) as caught:
        load_profile(path, overrides)
    return str(caught.value).replace(str(path), "p.yaml")


def test_a_wrong_value_is_laid_to_the_override_that_set_it_and_else_to_the_profile(tmp_path):
    text = refused(tmp_path, "draft: {vocab_size: 1}\n", "limit=8", "train.num_epochs=many")
    assert text.startswith("p.yaml: draft.vocab_size: ")
    assert "; --set train.num_epochs=many: train.num_epochs: Input should be a valid integer" in text
    assert "limit" not in text
    both = refused(tmp_path, "", "train.num_epochs=0", "train={num_epochs: -1}")
    assert both.startswith("--set train={num_epochs: -1}: train.num_epochs: ")
    assert refused(tmp_path, "train: {num_epochs: 0}\n", "train.seed=1").startswith("p.yaml: train.num_")


def test_values_that_do_not_fit_together_are_laid_to_the_profile_and_the_overrides_among_them(tmp_path):
    text = refused(tmp_path, "draft: {fc_norm: true}\n", "draft.norm_before_fc=true", "draft.num_layers=1")
    assert text.startswith("p.yaml with --set draft.norm_before_fc=true: draft: norm_before_fc and fc_norm")


def test_a_wrong_value_of_another_option_is_laid_to_that_option(tmp_path):
    limit = Override("limit", 2, "--limit 2")
    assert refused(tmp_path, "", limit).startswith("--limit 2: limit: ")


def test_a_profile_is_found_by_name_and_by_path():
    path = PROJECT_ROOT / "deployments" / "profiles" / "smollm2-135m-demo.yaml"
    assert find_profile("smollm2-135m-demo") == path
    assert find_profile(path) == path


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", ""])
def test_a_profile_that_is_no_mapping_is_refused(tmp_path, content):
    path = tmp_path / "p.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"p\.yaml"):
        load_profile(path)


def test_stages_come_in_pipeline_order():
    assert parse_stages(["train", " extract "]) == ("extract", "train")
    assert parse_stages(STAGES) == STAGES


@pytest.mark.parametrize("names", [[], ["nothing"], ["train", "exprot"]])
def test_unknown_and_missing_stages_are_refused(names):
    with pytest.raises(ConfigError, match="expected some of preflight, plan"):
        parse_stages(names)


def test_relative_paths_are_below_the_checkout(tmp_path):
    assert resolve_path("workspace") == PROJECT_ROOT / "workspace"
    assert resolve_path(str(tmp_path)) == tmp_path


def test_every_field_says_what_it_means():
    schema = RunConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    silent = [
        f"{section['title']}.{name}"
        for section in sections
        for name, field in section.get("properties", {}).items()
        if not field.get("description")
    ]
    assert silent == []


def test_a_value_that_is_not_yaml_is_refused_with_its_override():
    with pytest.raises(ConfigError, match=r"--set data\.prompts=\[a: the value is not YAML"):
        load_profile("smollm2-135m-demo", ["data.prompts=[a"])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_refused(value):
    assert "train.learning_rate: Input should be" in refusal(train={"learning_rate": value})


def test_a_long_wrong_value_is_cut():
    assert len(refusal(train={"num_epochs": "x" * 5000})) < 400


def test_a_home_that_nobody_has_is_refused():
    with pytest.raises(ConfigError, match="~nobody-at-all/x names nobody's home"):
        resolve_path("~nobody-at-all/x")
