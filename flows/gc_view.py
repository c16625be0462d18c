"""The command `eagle3 gc`: what it collects and prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape

from eagle3_core.config import RunConfig, resolve_path
from eagle3_core.errors import ConfigError, StoreError
from eagle3_core.host.run_folder import used_by_runs
from eagle3_core.lineage import find_remains
from eagle3_core.report.figures import format_bytes
from eagle3_core.sections import RetentionConfig
from eagle3_core.store.collect import GcReport, collect_garbage, restore
from eagle3_core.store.local import LocalStore
from eagle3_core.store.remote import RemoteStore
from eagle3_core.store.trash import find_entry
from flows.gc_table import gc_table

MAX_DAYS = 36_500.0
SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def days(text: str) -> float:
    """`90m`, `36h`, `14d`, `2w`, or a plain number of days.

    Raises:
        ConfigError: anything else, or more than a hundred years.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhdw]?)", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no span of time", expected="such as 90m, 36h, 14d or 2w")
    number = float(match[1]) * SECONDS[match[2] or "d"] / SECONDS["d"]
    if number > MAX_DAYS:
        raise ConfigError(f"{text!r} is too long a span of time", expected=f"at most {MAX_DAYS:g}d")
    return number


def size(text: str) -> ByteSize:
    """`500GiB`, or a plain number of bytes.

    Raises:
        ConfigError: anything else.
    """
    try:
        return TypeAdapter(ByteSize).validate_python(text.strip())
    except ValidationError:
        raise ConfigError(f"{text!r} is no size", expected="such as 500GiB") from None


def policy_of(
    store: LocalStore,
    config: RunConfig | None,
    keep_last: int | None,
    older_than: str | None,
    over: str | None,
    unreferenced: bool,
    keep: Sequence[str],
) -> RetentionConfig:
    """The profile's policies, each replaced by its option where that is given.

    Raises:
        ConfigError: a span, size or number that is none.
        StoreError: `keep` names none or several artifacts of the store.
    """
    base = config.retention if config else RetentionConfig()
    given = {
        "keep_last_captures": keep_last,
        "older_than_days": days(older_than) if older_than is not None else None,
        "max_bytes": size(over) if over is not None else None,
        "unreferenced": True if unreferenced else None,
        "keep": (*base.keep, *(str(find_remains(store, name)) for name in keep)) if keep else None,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    try:
        return RetentionConfig.model_validate(base.model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']}") from None


def gc(
    store: LocalStore,
    workspace: str,
    policy: RetentionConfig,
    *,
    force: Sequence[str],
    purge_after_days: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Collect and print.

    Raises:
        StoreError: there is no store, or it cannot be changed.
    """
    if not isinstance(store, RemoteStore) and not store.root.is_dir():
        raise StoreError(f"there is no store at {store.place}", remedy="set --store or --workspace")
    report = collect_garbage(
        store,
        policy,
        forced=[find_remains(store, name) for name in force],
        purge_after_days=purge_after_days,
        dry_run=dry_run,
        also_in_use=used_by_runs(resolve_path(workspace)),
    )
    show(report, as_json)
    if report.lines and not (as_json or policy.names_something or force or purge_after_days is not None):
        print("no policy was given, so nothing was named: see `eagle3 gc --help`")


def gc_restore(store: LocalStore, name: str, as_json: bool) -> None:
    """Put one artifact back and print it."""
    trash = store.trash()
    show(restore(store, find_entry(trash.entries(), name, trash.manifest)), as_json)


def show(report: GcReport, as_json: bool) -> None:
    """Print what was done and why, a line for each artifact."""
    if as_json:
        print(report.model_dump_json(indent=1))
        return
    console = Console()
    if report.lines:
        console.print(gc_table(report, console.width, datetime.now(UTC)))
        _show_sums(console, report)
    else:
        console.print(f"the store {escape(report.store)} is empty", highlight=False, soft_wrap=True)
    for warning in report.warnings:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False, soft_wrap=True)


def _show_sums(console: Console, report: GcReport) -> None:
    restored = sum(line.bytes for line in report.lines if line.action == "restored")
    verb = "would move" if report.dry_run else "moved"
    console.print(
        f"put back {format_bytes(restored)} into {escape(report.store)}"
        if restored
        else f"{verb} {format_bytes(report.trashed_bytes)} to the trash, "
        f"{'would remove' if report.dry_run else 'removed'} {format_bytes(report.purged_bytes)} for good; "
        f"{format_bytes(report.kept_bytes)} stay in {escape(report.store)}",
        highlight=False,
        soft_wrap=True,
    )
    if report.trashed_bytes and not report.dry_run:
        console.print("the trash takes space until `--purge`; `--restore ID` takes an artifact back")
