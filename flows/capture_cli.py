"""The commands `eagle3 capture import` and `eagle3 capture export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eagle3_core.errors import StepError, VerificationError
from flows.options import JsonOption

if TYPE_CHECKING:
    from eagle3_core.config import RunConfig
    from eagle3_core.contracts import ImportResult, ProgressEvent, StepName

FormatName = Literal["speculators-v1", "speculators"]
FormatOption = Annotated[
    FormatName,
    typer.Option(
        "--format",
        help="`speculators-v1` for a folder of data_{i}.pt files, `speculators` for a data folder with "
        "hidden_states/hs_{i}.safetensors.",
    ),
]
ProfileOption = Annotated[
    str, typer.Option("--profile", help="Names target, auxiliary ids, shard size and store.")
]
OverridesOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override of the profile; repeatable.")
]

capture_app = typer.Typer(no_args_is_help=True, help="Import or export captured hidden states.")


@capture_app.command("import")
def import_capture(
    folder: Annotated[Path, typer.Argument(help="Folder in the foreign format.")],
    profile: ProfileOption,
    form: FormatOption,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="IDS",
            help="Stored layers in the format's own counting, comma-separated, the final one last; needed "
            "where the folder does not name them and they may not be the profile's.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Also hold the states against the target: next tokens, and layers of some samples.",
        ),
    ] = True,
    overrides: OverridesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a dataset and a capture of hidden states that another project has stored.

    Counts, token ids, layers and dtype are checked against the target of the profile; what does not fit is
    refused, and nothing is left out silently.
    """
    from eagle3_core.config import load_profile
    from eagle3_core.contracts import ImportSpec
    from eagle3_core.host.redaction import without_secrets
    from eagle3_core.target.locate import present_target

    config = load_profile(profile, overrides or [])
    target = present_target(config)
    spec = ImportSpec(
        config=without_secrets(config),
        target_path=str(target),
        folder=str(folder.resolve()),
        format=form,
        layer_ids=_numbers(layers),
    )
    result: ImportResult = _run(config, "import_capture", spec)
    agreement = _check(config, target, result) if check else None
    if as_json:
        print(result.model_dump_json(indent=1))
        return
    print(
        f"{result.dataset}\n{result.capture}\n{result.num_samples:,} samples, {result.num_tokens:,} tokens, "
        f"{result.num_shards:,} shards ({result.num_new_shards:,} new), {result.bytes:,} bytes"
    )
    print(f"next tokens agree to {agreement:.4f}" if check else "what the states mean was not checked")


@capture_app.command("export")
def export_capture(
    capture: Annotated[str, typer.Argument(help="KIND/ID, or the beginning of the id.")],
    folder: Annotated[Path, typer.Argument(help="New folder.")],
    profile: ProfileOption,
    form: FormatOption,
    overrides: OverridesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a capture as a folder that another project reads."""
    from eagle3_core.config import load_profile
    from eagle3_core.contracts import ExportCaptureSpec
    from eagle3_core.host.redaction import without_secrets
    from eagle3_core.lineage import find_artifact
    from eagle3_core.store.open import open_store

    config = load_profile(profile, overrides or [])
    spec = ExportCaptureSpec(
        config=without_secrets(config),
        capture=find_artifact(open_store(config), capture),
        folder=str(folder.resolve()),
        format=form,
    )
    result = _run(config, "export_capture", spec)
    if as_json:
        print(result.model_dump_json(indent=1))
        return
    print(f"{result.folder}: {result.num_samples:,} samples, {result.bytes:,} bytes")


def _check(config: RunConfig, target: Path, result: ImportResult) -> float:
    """Run the step `verify` on what was imported; whoever made the answers, a reference forward judges them.

    Raises:
        VerificationError: the states are not the target's.
    """
    from eagle3_core.contracts import StepSpec
    from eagle3_core.host.redaction import without_secrets
    from eagle3_core.identity import plan_verification

    spec = StepSpec(
        config=without_secrets(config),
        run_id="import",
        target_path=str(target),
        outputs={"verification": plan_verification(config, result.capture)},
        inputs={"dataset": result.dataset, "capture": result.capture},
    )
    try:
        return _run(config, "verify", spec).agreement
    except StepError as error:
        if error.error_type != "VerificationError":
            raise
        raise VerificationError(
            f"{result.capture} was imported, but is not what it claims to be: {error.found}",
            remedy=f"check --format, --layers and the target; log: {error.log_path}",
        ) from error


def _run(config: RunConfig, name: StepName, spec: object):  # type: ignore[no-untyped-def]
    """Run a step in the profile's engine environment, with its progress on standard error."""
    from pydantic import BaseModel

    from eagle3_core.host.process import run_step

    assert isinstance(spec, BaseModel)
    folder = config.workspace_path / "cache" / "logs"
    return run_step(name, spec, engine=config.engine, folder=folder, on_progress=_show)


def _show(event: ProgressEvent) -> None:
    of = f" of {event.total:g}" if event.total else ""
    typer.echo(f"{event.step}: {event.done:g}{of} {event.unit} {event.message}".rstrip(), err=True)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 3,31,59,61") from None
