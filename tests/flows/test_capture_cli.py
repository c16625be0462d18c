"""The commands that import and export captures, over the stand-in engine."""

from __future__ import annotations

import json

import pytest

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import load_profile
from eagle3_core.errors import EXIT_OK, EXIT_USER_ERROR
from eagle3_core.store.open import open_store
from flows.cli import main
from tests.doubles.profile import stand_in_profile

pytestmark = pytest.mark.orchestrator


@pytest.fixture
def profile(tmp_path):
    return stand_in_profile(tmp_path)


def command(profile, what, *arguments):
    return main(["capture", what, *arguments, "--profile", str(profile), "--format", "speculators-v1"])


def test_an_import_is_held_against_the_target_and_its_result_printed(profile, tmp_path, capsys):
    assert command(profile, "import", str(tmp_path / "theirs"), "--layers", "1,3,4,7", "--json") == EXIT_OK
    result = json.loads(capsys.readouterr().out)
    assert (result["num_samples"], result["num_shards"]) == (8, 1)
    store = open_store(load_profile(str(profile), []))
    capture = store.read(ArtifactRef.model_validate(result["capture"]))
    assert capture.identity["engine"] == "imported speculators-v1"
    (verification,) = (manifest for manifest in store.list() if manifest.ref.kind == "verification")
    assert verification.parents["capture"] == capture.ref
    assert verification.facts["capture_content"] == capture.content


def test_without_a_check_the_command_says_so(profile, tmp_path, capsys):
    assert command(profile, "import", str(tmp_path / "theirs"), "--no-check") == EXIT_OK
    assert "what the states mean was not checked" in capsys.readouterr().out


def test_states_that_are_not_the_targets_end_the_import_with_what_to_look_at(tmp_path, capsys):
    profile = stand_in_profile(tmp_path, fault={"step": "verify", "kind": "bad_states"})
    assert command(profile, "import", str(tmp_path / "theirs")) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert "was imported, but is not what it claims to be: 1 bad sample; check --format, --layers" in error


def test_layers_that_are_no_numbers_are_refused(profile, tmp_path, capsys):
    assert command(profile, "import", str(tmp_path), "--layers", "1,b") == EXIT_USER_ERROR
    assert "'1,b' is no list of numbers such as 3,31,59,61" in capsys.readouterr().err


def test_an_export_names_a_capture_by_the_beginning_of_its_id(profile, tmp_path, capsys):
    assert command(profile, "import", str(tmp_path / "theirs"), "--no-check", "--json") == EXIT_OK
    capture = json.loads(capsys.readouterr().out)["capture"]["id"]
    assert command(profile, "export", capture[:8], str(tmp_path / "ours")) == EXIT_OK
    assert capsys.readouterr().out == f"{tmp_path / 'ours'}: 8 samples, 1,234 bytes\n"
