"""The commands `eagle3 target fetch` and `eagle3 target inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from flows.options import JsonOption, WorkspaceOption

target_app = typer.Typer(no_args_is_help=True, help="Fetch or inspect a target.")


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
