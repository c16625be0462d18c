"""The `eagle3` command.

Commands that need no Prefect do not import it, so they answer at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from eagle3_core.config import STAGES, RunConfig, load_profile, parse_stages
from eagle3_core.errors import EXIT_BUG, EXIT_OK, EXIT_USER_ERROR, ConfigError, Eagle3Error
from flows.capture_cli import capture_app

if TYPE_CHECKING:
    from eagle3_core.store.local import LocalStore

DEFAULT_PROFILE = "smollm2-135m-demo"

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
    "`--debug` shows the traceback.",
)
target_app = typer.Typer(no_args_is_help=True, help="Fetch or inspect a target.")
app.add_typer(target_app, name="target")
app.add_typer(capture_app, name="capture")

ProfileArgument = Annotated[str, typer.Argument(help="YAML file, or name of a shipped profile.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override, e.g. `train.num_epochs=2`; values are YAML; repeatable."
    ),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=4, help="Rehearse on this many prompts before hours are spent.")
]
StagesOption = Annotated[
    str | None,
    typer.Option(
        "--stages",
        help=f"Comma-separated, of {', '.join(STAGES)}; default all. Inputs come from the store.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Prefect's own log.")]
WorkspaceOption = Annotated[
    str, typer.Option("--workspace", help="Workspace folder; relative paths are below the checkout.")
]

StoreOption = Annotated[
    str | None,
    typer.Option("--store", help="Store root, a folder or s3://; default `store` in the workspace."),
]


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

    config = _load(profile, limit, overrides)
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
    show_plan(_load(profile, limit, overrides), wanted, as_json)


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
    """List the runs of a workspace."""
    from flows.views import show_runs

    show_runs(workspace)


@app.command()
def lineage(
    artifact: Annotated[str, typer.Argument(help="KIND/ID as in `eagle3 plan`, or the id alone.")],
    workspace: WorkspaceOption = "workspace",
    store: StoreOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: `nodes` and `edges`, as docs/store.md says.")
    ] = False,
    as_dot: Annotated[bool, typer.Option("--dot", help="Print a graph for Graphviz.")] = False,
) -> None:
    """What made this artifact: every ancestor down to the prompt files and the target.

    Of each: the settings that determined it, run, code version and environment.
    """
    from eagle3_core.store.open import open_root
    from flows.lineage_view import show_lineage

    if as_json and as_dot:
        raise ConfigError("--json and --dot exclude each other")
    show_lineage(open_root(store, workspace), workspace, artifact, as_json, as_dot)


@app.command()
def verify(
    artifact: Annotated[str, typer.Argument(help="KIND/ID, or the beginning of the id.")],
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Compare samples of every shard with a transformers forward; download and hash what else "
            "lies in a bucket.",
        ),
    ] = False,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Check a capture's files, and start no engine environment.")
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="Profile of a capture; default the one of the run that made it."),
    ] = None,
    workspace: WorkspaceOption = "workspace",
    store: StoreOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check an artifact: every file is there, has its size and matches its hash.

    Of a capture every shard is then read in the engine environment of its profile: structure, counts and
    token ids against the dataset, finite values, and whether the states mean what they claim. Shards that
    are wrong are condemned, and the next extract makes them anew; samples that are not finite are left out
    of training.

    Prints a line for each thing that is wrong. Exit code 0 if nothing is, 2 if something is or the artifact
    is not there, 3 if the check itself failed.
    """
    from eagle3_core.config import resolve_path
    from flows import verify_view

    config = _load(profile, None, overrides) if profile else None
    place = _store(config if store is None else None, store, workspace)
    folder = config.workspace_path if config else resolve_path(workspace)
    code = verify_view.verify(
        place, artifact, config, folder, deep=deep, files_only=files_only, as_json=as_json
    )
    raise typer.Exit(code)


@app.command()
def gc(
    profile: Annotated[
        str | None, typer.Argument(help="Profile whose store and `retention` policies to use.")
    ] = None,
    workspace: WorkspaceOption = "workspace",
    store: StoreOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would go.")] = False,
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", min=1, help="Name all captures of a target but the N newest."),
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="AGE", help="Name what is older, e.g. 14d or 36h.")
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            "--over", metavar="SIZE", help="Name the oldest captures until the rest fits, e.g. 500GiB."
        ),
    ] = None,
    unreferenced: Annotated[
        bool, typer.Option("--unreferenced", help="Name data of which no kept checkpoint was made.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="KIND/ID", help="Keep this and what it was made from; repeatable."),
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option("--force", metavar="KIND/ID", help="Move this whatever needs it; repeatable."),
    ] = None,
    purge_after: Annotated[
        str | None,
        typer.Option("--purge-after", metavar="AGE", help="Remove for good what is in the trash longer."),
    ] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove for good what is in the trash already.")
    ] = False,
    restore: Annotated[
        str | None, typer.Option("--restore", metavar="ID", help="Put an artifact back from the trash.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move what policies name to the store's trash, and remove for good what lies there for long.

    An artifact goes if any policy names it and nothing keeps it. Kept is what a run in progress uses, what
    something that stays was made from, and what no newer artifact replaces: a capture only gives way to one
    that is complete and verified. Only --force overrides that. Without any policy the command only shows
    what there is. Moving is at once and can be undone with --restore; space is free after --purge.
    """
    from flows import gc_view

    config = _load(profile, None, overrides) if profile else None
    place = _store(config, store, workspace)
    if restore is not None:
        if dry_run or purge or any((keep_last, older_than, over, unreferenced, keep, force, purge_after)):
            raise ConfigError("--restore goes alone: it puts one artifact back and collects nothing")
        gc_view.gc_restore(place, restore, as_json)
        return
    if purge and purge_after is not None:
        raise ConfigError("--purge removes all that is in the trash, --purge-after what is there for longer")
    policy = gc_view.policy_of(config, keep_last, older_than, over, unreferenced, keep or [])
    after = gc_view.days(purge_after) if purge_after is not None else None
    if after is None and config is not None and policy.names_something:
        after = policy.purge_after_days
    gc_view.gc(
        place,
        config.workspace if config else workspace,
        policy,
        force=force or [],
        purge_after_days=0.0 if purge else after,
        dry_run=dry_run,
        as_json=as_json,
    )


@app.command()
def doctor(
    profile: ProfileArgument = DEFAULT_PROFILE, overrides: SetOption = None, as_json: JsonOption = False
) -> None:
    """Check host, engine environment, target and data for a profile; exit code 2 if something is wrong."""
    from flows.inspect_views import show_checks

    raise typer.Exit(show_checks(_load(profile, None, overrides), as_json))


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

    wanted = [f"capture.engine={engine}"] if engine else []
    wanted += [f"engine.device={device}"] if device else []
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

    for line in deploy_all(_load(profile, None, overrides)):
        typer.echo(line)


@app.command()
def config(
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON schema.")] = False,
) -> None:
    """List every field of a profile: type, default, meaning."""
    from flows.inspect_views import show_fields

    show_fields(as_json)


@target_app.command("fetch")
def target_fetch(
    name: Annotated[str, typer.Argument(help="A built-in target, e.g. smollm2-135m.")],
    workspace: WorkspaceOption = "workspace",
    engine_python: Annotated[
        str | None, typer.Option("--engine-python", help="Interpreter of the engine environment.")
    ] = None,
) -> None:
    """Fetch a built-in target and convert it to a Hugging Face folder."""
    from flows.inspect_views import fetch_target

    fetch_target(name, workspace, engine_python)


@target_app.command("inspect")
def target_inspect(
    target: Annotated[str, typer.Argument(help="Built-in name, folder, or hub id ORG/NAME.")],
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit of a hub id.")
    ] = None,
    workspace: WorkspaceOption = "workspace",
    as_json: JsonOption = False,
) -> None:
    """Show what is known of a target without loading it: layers, sizes, capture ids, fingerprint.

    Of a hub id that is not in the local cache only configuration, tokenizer and weight headers are read;
    HF_ENDPOINT and HF_TOKEN are honoured.
    """
    from flows.inspect_views import target_config
    from flows.target_view import show_target

    show_target(target_config(target, workspace, revision), as_json)


def _store(config: RunConfig | None, root: str | None, workspace: str) -> LocalStore:
    """The store of a profile, or of --store and --workspace.

    Raises:
        ConfigError: both.
    """
    from eagle3_core.store.open import open_root, open_store

    if config is None:
        return open_root(root, workspace)
    if root is not None:
        raise ConfigError("--store goes without a profile, which names its own", remedy="use --set store=...")
    return open_store(config)


def _load(profile: str, limit: int | None, overrides: list[str] | None) -> RunConfig:
    return load_profile(profile, [*(overrides or []), *([f"limit={limit}"] if limit else [])])


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
        usage = error.format_message()  # empty where the help was shown, for want of a command
        return _say(f"{usage}; `--help` lists what there is", EXIT_USER_ERROR) if usage else EXIT_USER_ERROR
    except Exception as error:
        if debug:
            raise
        if isinstance(error, Eagle3Error):
            return _say(str(error), error.exit_code)
        reason = " ".join(str(error).split())
        return _say(f"{type(error).__name__}: {reason}; `--debug` shows where", EXIT_BUG)


def _say(message: str, exit_code: int) -> int:
    print(f"eagle3: {message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
