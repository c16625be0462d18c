"""Options and arguments that several commands share, and what they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eagle3_core.config import STAGES, RunConfig, load_profile
from eagle3_core.errors import ConfigError
from eagle3_core.overrides import Override

if TYPE_CHECKING:
    from eagle3_core.store.local import LocalStore

DEFAULT_PROFILE = "smollm2-135m-demo"

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


def load(profile: str, limit: int | None, overrides: list[str] | None) -> RunConfig:
    """The profile with its overrides."""
    rehearsal = [Override("limit", limit, f"--limit {limit}")] if limit else []
    return load_profile(profile, [*(overrides or []), *rehearsal])


def store_of(config: RunConfig | None, root: str | None, workspace: str) -> LocalStore:
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
