"""The commands `eagle3 lineage` and `eagle3 verify`: what lies in a store."""

from __future__ import annotations

from typing import Annotated

import typer

from eagle3_core.errors import ConfigError
from flows.options import JsonOption, SetOption, StoreOption, WorkspaceOption, load, store_of


def lineage(
    artifact: Annotated[str, typer.Argument(help="KIND/ID as in `eagle3 plan`, or the beginning of the id.")],
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

    config = load(profile, None, overrides) if profile else None
    place = store_of(config if store is None else None, store, workspace)
    folder = config.workspace_path if config else resolve_path(workspace)
    code = verify_view.verify(
        place, artifact, config, folder, deep=deep, files_only=files_only, as_json=as_json
    )
    raise typer.Exit(code)
