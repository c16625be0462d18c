"""The command line's errors and the commands that need no Prefect."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from eagle3_core.config import PROJECT_ROOT, STAGES, load_profile
from eagle3_core.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR
from eagle3_core.host.run_folder import create_run_folder
from tests.doubles.profile import stand_in_profile
from tests.doubles.target import make_target

pytestmark = pytest.mark.orchestrator


@pytest.fixture
def profile(tmp_path):
    return stand_in_profile(tmp_path)


def edit(profile, **changes):
    """Change dotted fields of a profile's file."""
    document = yaml.safe_load(profile.read_text())
    for key, value in changes.items():
        *sections, field = key.split("__")
        section = document
        for name in sections:
            section = section.setdefault(name, {})
        section[field] = value
    profile.write_text(yaml.safe_dump(document))


def unreadable_target(profile):
    folder = profile.parent / "target"
    (folder / "model.safetensors").write_bytes(b"\x00" * 4)
    return "model.safetensors is not a whole safetensors file"


def missing_target(profile):
    edit(profile, target__model=str(profile.parent / "nowhere"))
    return "nowhere"


def unknown_key(profile):
    edit(profile, train__num_epoch=3)
    return "unknown key train.num_epoch, perhaps num_epochs is meant; "


def wrong_type(profile):
    edit(profile, train__num_epochs="many")
    return "train.num_epochs: Input should be a valid integer"


def too_few_layers(profile):
    make_target(profile.parent / "target", num_layers=4)
    return "4 layers is too small"


def bad_layer_ids(profile):
    edit(profile, target__aux_layer_ids=[2, 2, 5])
    return "[2, 2, 5] cannot be captured"


def no_engine(profile):
    edit(profile, engine__python=str(profile.parent / "nowhere"))
    return "has no interpreter"


def missing_prompts(profile):
    edit(profile, data__prompts=[str(profile.parent / "none.jsonl")])
    return "none.jsonl, which is not a file"


def workspace_is_a_file(profile):
    (profile.parent / "workspace").write_text("")
    return "cannot write to"


def not_enough_memory(profile):
    edit(profile, limits__min_free_memory_gib=100000)
    return "GiB of memory are available"


def excluding_settings(profile):
    edit(profile, engine__tensor_parallel_size=2)
    return "engine.tensor_parallel_size is 2 on the CPU"


@pytest.mark.parametrize(
    "break_it",
    [
        unreadable_target,
        missing_target,
        unknown_key,
        wrong_type,
        too_few_layers,
        bad_layer_ids,
        no_engine,
        missing_prompts,
        workspace_is_a_file,
        not_enough_memory,
        excluding_settings,
    ],
)
def test_what_cannot_run_ends_in_one_line_before_any_step(profile, break_it, capsys, prefect_home):
    from flows.cli import main

    expected = break_it(profile)
    assert main(["run", str(profile)]) == EXIT_USER_ERROR
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert errors.startswith("eagle3: ")
    assert expected in errors
    assert not list(profile.parent.glob("workspace/runs/*"))


def test_a_traceback_that_is_asked_for_changes_neither_the_line_nor_the_exit_code(profile, capsys):
    from flows.cli import main

    missing_target(profile)
    for command in ("run", "plan"):
        assert main([command, str(profile)]) == EXIT_USER_ERROR
        line = capsys.readouterr().err
        assert main([command, str(profile), "--debug"]) == EXIT_USER_ERROR
        errors = capsys.readouterr().err
        assert errors.startswith("Traceback (most recent call last):\n")
        assert errors.endswith(line)


def test_an_unknown_stage_names_the_valid_ones(profile, capsys):
    from flows.cli import main

    assert main(["run", str(profile), "--stages", "train,exprot"]) == EXIT_USER_ERROR
    assert (
        f"unknown stage 'exprot', perhaps export is meant; expected some of {', '.join(STAGES)}"
        in capsys.readouterr().err
    )


def test_stages_whose_inputs_are_not_in_the_store_are_refused_before_there_is_a_run(
    profile, capsys, prefect_home
):
    from flows.cli import main

    assert main(["run", str(profile), "--stages", "train,export"]) == EXIT_USER_ERROR
    errors = capsys.readouterr().err
    assert errors.startswith("eagle3: the stage train needs dataset/")
    assert errors.endswith("run the stage prepare first (`--stages prepare,extract,verify,train`)\n")
    assert not list(profile.parent.glob("workspace/runs/*"))


WITHOUT_PREFECT = """
import json, sys
from flows.cli import main
code = main(json.loads(sys.argv[1]))
loaded = [name for name in ("prefect", "torch", "vllm") if name in sys.modules]
sys.exit(f"imported {loaded}" if loaded else code)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "{profile}"],
        ["plan", "{profile}", "--json"],
        ["doctor", "{profile}"],
        ["config"],
        ["config", "--json"],
        ["runs", "--workspace", "{folder}/workspace"],
        ["target", "inspect", "{folder}/target"],
    ],
)
def test_commands_that_only_look_import_neither_prefect_nor_torch(profile, arguments):
    given = [text.format(profile=profile, folder=profile.parent) for text in arguments]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PREFECT, json.dumps(given)],
        cwd=PROJECT_ROOT,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (EXIT_OK, "")
    assert done.stdout


@pytest.mark.parametrize(
    "command",
    ["run", "plan", "show", "runs", "lineage", "verify", "gc", "doctor", "deploy", "config", "target fetch"],
)
def test_every_command_has_help(command, capsys):
    from flows.cli import main

    assert main([*command.split(), "--help"]) == EXIT_OK
    shown = capsys.readouterr().out
    assert len(shown) > 200
    assert "--debug" in shown


def test_the_plan_names_ids_and_what_is_there(profile, capsys):
    from flows.cli import main

    main(["plan", str(profile), "--json", "--limit", "5"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["workload"]["num_samples"] == 5
    assert plan["aux_layer_ids"] == [2, 4, 5]
    states = {entry["kind"]: (entry["state"], entry["ref"] is None) for entry in plan["artifacts"]}
    assert states["dataset"] == ("missing", False)
    assert states["capture"] == ("missing", True)


def test_the_plan_says_that_fewer_prompts_are_held_out_than_the_benchmark_wants(profile, capsys):
    from flows.cli import main

    shortage = "benchmark.num_prompts is 5,000, but only 1 are held out"
    assert main(["plan", str(profile), "--set", "benchmark.num_prompts=5000"]) == EXIT_OK
    assert shortage in capsys.readouterr().out
    main(["plan", str(profile), "--set", "benchmark.num_prompts=1"])
    assert "held out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["plan", "smollm2-135m-demo", "--set", "workspace={}"], ["target", "inspect", "smollm2-135m"]],
)
def test_looking_at_a_built_in_target_before_it_was_fetched_says_how_to_fetch_it(arguments, tmp_path, capsys):
    from flows.cli import main

    folder = str(tmp_path / "workspace")
    given = [text.format(folder) for text in arguments]
    given += ["--workspace", folder] if given[0] == "target" else []
    assert main(given) == EXIT_USER_ERROR
    assert f"`eagle3 target fetch smollm2-135m --workspace {folder}`" in capsys.readouterr().err


def test_nobody_is_told_to_fetch_a_target_into_a_workspace_that_cannot_be_written(tmp_path, capsys):
    from flows.cli import main

    (tmp_path / "file").write_text("")
    folder = f"{tmp_path}/file/workspace"
    assert main(["plan", "smollm2-135m-demo", "--set", f"workspace={folder}"]) == EXIT_USER_ERROR
    assert capsys.readouterr().err == (
        f"eagle3: cannot write to {folder} (Not a directory); "
        "set `workspace` to a folder that can be written\n"
    )


def test_doctor_reports_every_problem_at_once(profile, capsys):
    from flows.cli import main

    missing_target(profile)
    no_engine(profile)
    assert main(["doctor", str(profile), "--json"]) == EXIT_USER_ERROR
    checks = {check["name"]: check["ok"] for check in json.loads(capsys.readouterr().out)}
    failed = [name for name, ok in checks.items() if not ok]
    assert failed == ["target", "engine environment", "capture engine", "openmp"]


def test_every_field_of_a_profile_is_listed(capsys):
    from flows.cli import main

    main(["config"])
    text = capsys.readouterr().out
    assert "train.num_epochs  whole number, default 8" in text
    assert "name  text, required" in text
    assert "target.aux_layer_ids  list of whole numbers or null, default null" in text
    assert "train.betas  list of 2 numbers, default" in text
    assert "train.schedule  cosine, linear or constant, default cosine" in text
    assert not re.search(r"tuple|Literal|None|ByteSize", text)


def test_an_error_that_nobody_expected_is_one_line_too(profile, capsys, monkeypatch):
    from flows import views
    from flows.cli import main

    def broken(*arguments):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(views, "show_plan", broken)
    assert main(["plan", str(profile)]) == EXIT_BUG
    assert capsys.readouterr().err == ("eagle3: ZeroDivisionError: division by zero; `--debug` shows where\n")
    assert main(["plan", str(profile), "--debug"]) == EXIT_BUG
    errors = capsys.readouterr().err
    assert "in broken\n" in errors
    assert errors.endswith("eagle3: ZeroDivisionError: division by zero\n")


def test_an_exit_with_a_message_is_a_failure(profile, capsys, monkeypatch):
    from flows import views
    from flows.cli import main

    monkeypatch.setattr(views, "show_plan", lambda *arguments: sys.exit("no more"))
    assert main(["plan", str(profile)]) == EXIT_BUG
    assert capsys.readouterr().err == "eagle3: no more\n"


@pytest.mark.parametrize("name", ["capture/ZZZZZZZZZZZZZZZZ", "nothing/0123456789abcdef", "0123"])
def test_an_artifact_that_does_not_exist_is_one_line(profile, capsys, name):
    from flows.cli import main

    assert main(["lineage", name, "--store", str(profile.parent / "store")]) == EXIT_USER_ERROR
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("changes", "word"), [({}, "run"), ({"limit": 4}, "rehearsal")])
def test_a_rehearsal_is_not_shown_as_a_run(profile, capsys, changes, word):
    from flows.cli import main

    edit(profile, **changes)
    config = load_profile(profile)
    run = create_run_folder(config, ("report",), "20260101-000000-stand-in-0123")
    run.finish("completed")
    assert main(["show", "--workspace", str(config.workspace_path)]) == EXIT_OK
    assert f"\n{word} {run.run_id} completed\n" in capsys.readouterr().out


def test_a_run_folder_whose_making_was_interrupted_is_no_run(profile, capsys):
    from flows.cli import main

    workspace = profile.parent / "workspace"
    (workspace / "runs" / "20260101-000000-a-0123" / "logs").mkdir(parents=True)
    assert main(["runs", "--workspace", str(workspace)]) == EXIT_OK
    assert "no runs in" in capsys.readouterr().out
    assert main(["show", "--workspace", str(workspace)]) == EXIT_USER_ERROR
    assert "no run matches 'latest'" in capsys.readouterr().err


def test_a_folder_flows_where_the_user_works_is_not_taken_for_ours(tmp_path, monkeypatch, prefect_home):
    from flows.embedded_server import EmbeddedServer

    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    server = EmbeddedServer(tmp_path / "server.log")
    try:
        server.wait()
    finally:
        server.stop()


def test_an_api_that_does_not_answer_is_one_line(profile, eagle3_command):
    for command in ("run", "deploy"):
        arguments = (command, "--profile", str(profile)) if command == "deploy" else (command, str(profile))
        done = eagle3_command(*arguments, PREFECT_API_URL="http://127.0.0.1:9/api")
        assert done.returncode == EXIT_USER_ERROR, done.stderr
        assert done.stderr.count("\n") == 1
        assert "the Prefect API http://127.0.0.1:9/api does not answer" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--limit", "3"], "Invalid value for '--limit': Input should be greater than or equal to 4"),
        (["trian"], "No such command 'trian'; `--help`"),
        (["run", "--limit"], "Option '--limit' requires an argument; `--help`"),
        (["plan", "--stage", "x"], "No such option: --stage"),
    ],
)
def test_a_command_that_cannot_be_read_is_one_line(arguments, message, capsys):
    from flows.cli import main

    assert main(arguments) == EXIT_USER_ERROR
    errors = capsys.readouterr().err
    assert errors.startswith(f"eagle3: {message}")
    assert errors.count("\n") == 1


def test_without_a_command_the_help_is_shown(capsys):
    from flows.cli import main

    assert main([]) == EXIT_USER_ERROR
    shown = capsys.readouterr()
    assert "Usage" in shown.out + shown.err
    assert "eagle3:" not in shown.err


def test_ctrl_c_has_its_own_exit_code(profile, capsys, monkeypatch):
    from flows import views
    from flows.cli import main

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(views, "show_plan", interrupted)
    assert main(["plan", str(profile)]) == EXIT_INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err
