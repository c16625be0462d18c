"""The `eagle3` command.

Commands that need no Prefect do not import it, so they answer at once.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from eagle3_core.config import load_profile, parse_stages
from eagle3_core.errors import EXIT_BUG, EXIT_OK, EXIT_USER_ERROR, ConfigError, Eagle3Error
from eagle3_core.overrides import Override
from flows.capture_cli import capture_app
from flows.gc_cli import gc
from flows.options import (
    DEFAULT_PROFILE,
    DebugOption,
    JsonOption,
    LimitOption,
    ProfileArgument,
    SetOption,
    StagesOption,
    WorkspaceOption,
    load,
)
from flows.store_cli import lineage, verify
from flows.target_cli import target_app

app = typer.Typer(
    name="eagle3",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train an EAGLE-3 draft for a target model and measure it in the engine that will serve it.",
    epilog="A PROFILE is a YAML file or the name of one in deployments/profiles. Errors are one line and the "
    "exit code says whose they are: 2 yours to correct, 3 a step that failed (its log is named), 1 a bug. "
    "With `--debug`, which every command takes, the traceback comes first.",
)
app.add_typer(target_app, name="target")
app.add_typer(capture_app, name="capture")


@app.command()
def run(
    profile: ProfileArgument = DEFAULT_PROFILE,
    stages: StagesOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
    debug: DebugOption = False,
) -> None:
    """Run the pipeline, or some stages of it; what is there already and intact is reused.

    Uses the Prefect API of PREFECT_API_URL or of the active Prefect profile, else an embedded server.
    """
    from flows.launch import launch

    config = load(profile, limit, overrides)
    wanted = parse_stages(stages.split(",")) if stages is not None else None
    raise typer.Exit(launch(config, wanted, debug=debug))


@app.command()
def plan(
    profile: ProfileArgument = DEFAULT_PROFILE,
    stages: StagesOption = None,
    limit: LimitOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run would make: artifact ids, bytes, rough minutes, and what is there already."""
    from flows.views import show_plan

    wanted = parse_stages(stages.split(",")) if stages is not None else None
    show_plan(load(profile, limit, overrides), wanted, as_json)


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="Run id, a part of it, its folder, or `latest`.")] = "latest",
    workspace: WorkspaceOption = "workspace",
    as_json: JsonOption = False,
) -> None:
    """Show a run: its stages, and the figures that it measured."""
    from flows.views import show_run

    show_run(workspace, run, as_json)


@app.command()
def runs(workspace: WorkspaceOption = "workspace") -> None:
    """List the runs of a workspace, and tell Prefect, if its API is configured, of those that were killed."""
    from flows.views import show_runs

    show_runs(workspace)


for command in (lineage, verify, gc):
    app.command()(command)


@app.command()
def doctor(
    profile: ProfileArgument = DEFAULT_PROFILE, overrides: SetOption = None, as_json: JsonOption = False
) -> None:
    """Check host, engine environment, target and data for a profile; exit code 2 if something is wrong."""
    from flows.inspect_views import show_checks

    raise typer.Exit(show_checks(load(profile, None, overrides), as_json))


@app.command()
def probe(
    profile: ProfileArgument = DEFAULT_PROFILE,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine", help="vllm, sglang (needs capture.python) or reference; default the profile's."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Another target (built-in name, folder, cached hub id), or an architecture of "
            "docs/compatibility.md, e.g. `qwen3-moe`.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every known architecture.")] = False,
    record: Annotated[
        Path | None, typer.Option("--record", help="With --all: write the results here as JSON.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ask again even if the answer is known.")] = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out whether the engine captures the right layers and requests, with a miniature of the target.

    A run's preflight does this by itself. An answer that is ok is remembered in the workspace.
    Exit code 2 if the answer is no.
    """
    from flows.probe_view import probe_known, probe_target

    wanted = [Override("capture.engine", engine, f"--engine {engine}")] if engine else []
    wanted += [Override("engine.device", device, f"--device {device}")] if device else []
    config = load_profile(profile, [*wanted, *(overrides or [])])
    if every:
        if target or fresh:
            raise ConfigError("--all takes neither --target nor --fresh: it asks every architecture again")
        raise typer.Exit(probe_known(config, record, as_json))
    if record:
        raise ConfigError("--record goes with --all")
    raise typer.Exit(probe_target(config, target, fresh, as_json))


@app.command()
def deploy(
    profile: Annotated[
        str, typer.Option("--profile", help="Profile that the deployments run.")
    ] = DEFAULT_PROFILE,
    overrides: SetOption = None,
) -> None:
    """Register the deployments full, extract, train, benchmark and nightly; safe to repeat.

    Needs a Prefect server (`prefect server start`) and PREFECT_API_URL. Start a worker with
    `prefect worker start --pool eagle3`, then `prefect deployment run eagle3/full --watch`.
    """
    from flows.launch import quiet_prefect

    quiet_prefect(debug=False)
    from flows.deploy import deploy_all

    for line in deploy_all(load(profile, None, overrides)):
        typer.echo(line)


@app.command()
def config(
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON schema.")] = False,
) -> None:
    """List every field of a profile: type, default, meaning."""
    from flows.inspect_views import show_fields

    show_fields(as_json)


for group in (app, target_app, capture_app):
    for registered in group.registered_commands:
        if registered.callback is not run:  # which lists it: there it shows Prefect's log too
            registered.epilog = "With `--debug` an error comes with its traceback."


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the documented exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    if given[:1] != ["run"]:
        given = [argument for argument in given if argument != "--debug"]
    try:
        code = app(args=given, standalone_mode=False)  # of Ctrl-C it makes 130
        return code if isinstance(code, int) else EXIT_OK
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or EXIT_OK
        return _say(str(ended.code), EXIT_BUG)
    except TyperException as error:
        usage = error.format_message().rstrip(".")  # empty where the help was shown, for want of a command
        return _say(f"{usage}; `--help` lists what there is", EXIT_USER_ERROR) if usage else EXIT_USER_ERROR
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, Eagle3Error):
            return _say(str(error), error.exit_code)
        reason = " ".join(str(error).split())
        hint = "" if debug else "; `--debug` shows where"
        return _say(f"{type(error).__name__}: {reason}{hint}", EXIT_BUG)


def _say(message: str, exit_code: int) -> int:
    print(f"eagle3: {message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
