"""The commands `eagle3 lineage`, `eagle3 verify` and `eagle3 gc`: what lies in a store."""

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

    config = load(profile, None, overrides) if profile else None
    place = store_of(config, store, workspace)
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
