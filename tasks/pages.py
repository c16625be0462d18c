"""What Prefect's artifacts say: pages in Markdown and rows of tables, made from outcomes and manifests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from eagle3_core.artifacts import Manifest
from eagle3_core.lineage import Lineage
from eagle3_core.stage_run import StageOutcome

MAX_FILES = 50
MAX_ENTRIES = 50
MAX_CELL = 400
MAX_ROWS = 500
FROM_ZERO = ("epoch", "best_epoch")
"""Figures that results count from 0 and people from 1."""
Row = dict[str, Any]


@dataclass(frozen=True)
class TablePage:
    """A table artifact.

    Attributes:
        key: the same in every run, so that Prefect keeps its history.
        rows: with the same columns in all of them.
        description: one line above the table.
    """

    key: str
    rows: Sequence[Row]
    description: str


def outcome_markdown(outcome: StageOutcome, heading: str) -> str:
    """The stage's page: what it is, what it made, every figure of its result, and its lists as tables."""
    rows = [
        ("outcome", outcome.message),
        ("seconds", f"{outcome.seconds:.1f}"),
        *((ref.kind, f"`{ref}`") for ref in outcome.artifacts),
        *_figures(outcome.result),
        *_figures(outcome.details),
    ]
    lists = "".join(_entry_tables(outcome.result | outcome.details))
    return f"## {heading}\n\n{_table(rows)}\n{lists}"


def manifest_key(manifest: Manifest) -> str:
    """The key of a manifest's page: one for each kind, so that its history shows the versions."""
    return f"eagle3-manifest-{manifest.ref.kind}"


def manifest_markdown(manifest: Manifest, lineage: Lineage) -> str:
    """An artifact's page: what determined it, what it holds, what it was made from, by whom and with what."""
    made = manifest.provenance
    about = [
        ("artifact", f"`{manifest.ref}`"),
        ("state", manifest.state),
        ("files", f"{len(manifest.files):,}"),
        ("bytes", f"{manifest.bytes:,}"),
        ("hash over all files", f"`{manifest.content}`"),
        (
            "made from",
            ", ".join(f"{role} `{ref}`" for role, ref in manifest.parents.items()) or "its sources",
        ),
        ("lineage", lineage_line(lineage)),
        ("made", f"{made.created_at} on {made.host} by the run `{made.run_id}`"),
        ("code", f"`{made.git_commit}`"),
        ("environment", f"Python {made.python}, {_versions(made.packages)}"),
    ]
    identity = {key: value for key, value in manifest.identity.items() if key != "made_from"}
    files = [(f"`{entry.path}`", f"{entry.bytes:,} bytes, `{entry.xxh3_128}`") for entry in manifest.files]
    left_out = len(files) - MAX_FILES
    more = f"\n{left_out:,} more files are in the manifest.\n" if left_out > 0 else ""
    return (
        f"## {manifest.ref}\n\n{_table(about)}\n"
        f"\n### What determined it\n\n{_table(_figures(identity))}\n{''.join(_entry_tables(identity))}"
        f"\n### Files (xxh3-128)\n\n{_table(files[:MAX_FILES])}\n{more}"
    )


def lineage_line(lineage: Lineage) -> str:
    """Every ancestor in one line, the roots first."""
    names = [f"`{node.id}`" + (f" ({node.name})" if node.name else "") for node in lineage.nodes]
    return " → ".join(names)


def stage_tables(outcome: StageOutcome) -> list[TablePage]:
    """The tables that a stage's outcome fills; a stage without rows has none."""
    makers = {
        "plan": _plan_rows, "verify": _verify_rows, "extract": _extract_rows, "train": _train_rows,
        "cleanup": _cleanup_rows,
    }  # fmt: skip
    maker = makers.get(outcome.stage)
    rows = maker(outcome) if maker else []
    if not rows:
        return []
    shown = rows[:MAX_ROWS]
    if len(rows) > MAX_ROWS:
        columns = dict.fromkeys(rows[0], "")
        shown.append(columns | {next(iter(columns)): f"and {len(rows) - MAX_ROWS:,} more"})
    key = f"eagle3-{outcome.stage}-table"
    return [TablePage(key, shown, f"{outcome.stage}: {outcome.message}"[:500])]


def _plan_rows(outcome: StageOutcome) -> list[Row]:
    """Each file system, then what takes its space and what other runs have reserved there."""
    rows = []
    for system in outcome.details.get("file_systems", ()):
        name = system["mount"]
        rows.append(_space_row(name, "all of it", "", system["new_bytes"], system["need_bytes"]))
        rows[-1]["free bytes"] = f"{system['free_bytes']:,}"
        rows += [
            _space_row(name, item["what"], item["stage"], item["bytes"], item["peak_bytes"])
            for item in system["items"]
        ]
        rows += [
            _space_row(name, f"reserved by the run {run}", "", size, size)
            for run, size in system["reserved"].items()
        ]
    return rows


def _space_row(mount: str, what: str, stage: str, stays: int, most: int) -> Row:
    sizes = {"stays": f"{stays:,}", "at most": f"{most:,}", "free bytes": ""}
    return {"file system": mount, "what": what, "stage": stage, **sizes}


def _verify_rows(outcome: StageOutcome) -> list[Row]:
    """Condemned shards first, then bad samples, layers and the agreement."""
    result = outcome.result
    rows = [
        _finding("condemned shard", shard.get("shard", ""), "", shard.get("reason", shard.get("problem", "")))
        for shard in result.get("condemned", ())
    ]
    rows += [
        _finding("bad sample", bad["shard"], bad["key"], bad["problem"])
        for bad in result.get("bad_samples", ())
    ]
    rows += [
        _finding(
            "layer",
            "",
            f"capture id {layer['capture_id']}",
            f"nearest {layer['nearest_id']}, median error {layer['median_error']:.4g}, "
            f"nearest other {layer['nearest_wrong_median']:.4g}",
        )
        for layer in result.get("layers", ())
    ]
    if result.get("num_rows_checked"):
        found = f"{result['agreement']:.4f} of {result['num_rows_checked']:,} rows"
        rows.append(_finding("next tokens", "", "", f"{found}, {result.get('num_ties', 0):,} of them ties"))
    return rows


def _finding(what: str, shard: str, where: str, finding: str) -> Row:
    return {"what": what, "shard": shard, "sample or layer": where, "finding": finding}


def _extract_rows(outcome: StageOutcome) -> list[Row]:
    return [
        {"what": "quarantined sample", "key": one["key"], "reason": one["reason"]}
        for one in outcome.result.get("quarantined", ())
    ]


def _train_rows(outcome: StageOutcome) -> list[Row]:
    """Every look at the held-out split, and which weights were kept."""
    result = outcome.result
    kept = {one["step"]: one["file"] for one in result.get("kept", ())}
    return [
        {
            "step": f"{look['step']:,}",
            "epoch": look["epoch"] + 1,
            "training loss": f"{look['train_loss']:.4f}",
            "held-out loss": f"{look['heldout_loss']:.4f}",
            "held-out acceptance length": f"{look['heldout']['acceptance_length']:.4f}",
            "kept as": kept.get(look["step"], ""),
        }
        for look in result.get("evaluations", ())
    ]


def _cleanup_rows(outcome: StageOutcome) -> list[Row]:
    return [
        {
            "what": line["action"],
            "artifact": line["artifact"],
            "bytes": line["bytes"],
            "made": line["created_at"],
            "why": "; ".join(line["reasons"]),
        }
        for line in outcome.details.get("retention", {}).get("lines", ())
    ]


def _figures(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Numbers and words of a result; of a list of entries how many there are."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            rows += _figures(value, f"{prefix}{name}.")
        elif _are_entries(value):
            rows.append((prefix + name, f"{len(value):,}, listed below"))
        elif isinstance(value, float):
            rows.append((prefix + name, f"{value:,.4g}"))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((prefix + name, f"{value + (name in FROM_ZERO):,}"))
        elif value is not None:
            rows.append((prefix + name, str(value)))
    return rows


def _entry_tables(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A table of each list of entries: one a row, with their plain figures."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _entry_tables(value, f"{prefix}{name}.")
        elif _are_entries(value):
            rows = [dict(_figures(_plain(entry))) for entry in value[:MAX_ENTRIES]]
            columns = list(dict.fromkeys(column for row in rows for column in row))
            cells = [[row.get(column, "") for column in columns] for row in rows]
            lines = [columns, ["---"] * len(columns), *cells]
            table = "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)
            left_out = len(value) - MAX_ENTRIES
            more = f"\nand {left_out:,} more\n" if left_out > 0 else ""
            yield f"\n### {prefix}{name}\n\n{table}\n{more}"


def _are_entries(value: object) -> TypeGuard[Sequence[dict[str, Any]]]:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, dict) for one in value)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not isinstance(value, dict | list | tuple)}


def _versions(packages: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(packages.items())) or "no packages"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = "\n".join(f"| {_cell(name)} | {_cell(text)} |" for name, text in rows)
    return f"| | |\n|---|---|\n{lines}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:MAX_CELL]
