"""The command `eagle3 gc`: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from eagle3_core.errors import ConfigError
from flows.options import JsonOption, SetOption, StoreOption, WorkspaceOption, load, store_of

ProfileWithPolicies = Annotated[
    str | None, typer.Argument(help="Profile whose store and `retention` policies to use.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would go.")]
KeepLastOption = Annotated[
    int | None, typer.Option("--keep-last", min=1, help="Name all captures of a target but the N newest.")
]
OlderThanOption = Annotated[
    str | None, typer.Option("--older-than", metavar="AGE", help="Name what is older, e.g. 14d or 36h.")
]
OverOption = Annotated[
    str | None,
    typer.Option("--over", metavar="SIZE", help="Name the oldest captures until the rest fits, e.g. 500GiB."),
]
UnreferencedOption = Annotated[
    bool, typer.Option("--unreferenced", help="Name data of which no kept checkpoint was made.")
]
KeepOption = Annotated[
    list[str] | None,
    typer.Option("--keep", metavar="KIND/ID", help="Keep this and what it was made from; repeatable."),
]
ForceOption = Annotated[
    list[str] | None,
    typer.Option("--force", metavar="KIND/ID", help="Move this whatever needs it; repeatable."),
]
PurgeAfterOption = Annotated[
    str | None,
    typer.Option("--purge-after", metavar="AGE", help="Remove for good what is in the trash longer."),
]
PurgeOption = Annotated[bool, typer.Option("--purge", help="Remove for good what is in the trash already.")]
RestoreOption = Annotated[
    str | None, typer.Option("--restore", metavar="KIND/ID", help="Put an artifact back from the trash.")
]


def gc(
    profile: ProfileWithPolicies = None,
    workspace: WorkspaceOption = "workspace",
    store: StoreOption = None,
    dry_run: DryRunOption = False,
    keep_last: KeepLastOption = None,
    older_than: OlderThanOption = None,
    over: OverOption = None,
    unreferenced: UnreferencedOption = False,
    keep: KeepOption = None,
    force: ForceOption = None,
    purge_after: PurgeAfterOption = None,
    purge: PurgeOption = False,
    restore: RestoreOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move what policies name to the store's trash, and remove for good what lies there for long.

    An artifact goes if any policy names it and nothing keeps it. Kept is what a run in progress uses, what
    something that stays was made from, and what no newer artifact replaces: a capture only gives way to one
    that is complete and verified. Only --force overrides that. Without any policy the command only shows
    what there is. Moving is at once and can be undone with --restore; space is free after --purge.

    An artifact is named KIND/ID or ID, of which the beginning is enough.
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
    policy = gc_view.policy_of(place, config, keep_last, older_than, over, unreferenced, keep or [])
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
