"""The table of `eagle3 gc`: whole names and times where there is room, short ones in 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from rich.markup import escape
from rich.table import Table

from eagle3_core.artifacts import ARTIFACT_KINDS, ID_LENGTH
from eagle3_core.report.figures import format_bytes
from eagle3_core.store.collect import Action, GcLine, GcReport

WIDE = 120
"""From this many columns on nothing is shortened."""
MIN_DIGITS = 8
ORDER: tuple[Action, ...] = ("to trash", "purged", "restored", "in trash", "kept")
STYLE = {"to trash": "yellow", "purged": "red", "restored": "green", "in trash": "cyan", "kept": "dim"}
IN_DRY_RUN = {"to trash": "would go to trash", "purged": "would be purged"}
IN_SHORT_DRY_RUN = {"to trash": "would go", "purged": "would purge"}
NAME = re.compile(rf"\b({'|'.join(ARTIFACT_KINDS)})/([0-9a-f]{{{ID_LENGTH}}})\b")
MOMENT = re.compile(r"\b(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d(?:[.\d]*)(?:\+00:00|Z)?")


def gc_table(report: GcReport, width: int, now: datetime) -> Table:
    """What happens first, what is named and stays next, the rest last.

    Args:
        report: what was done, or would be.
        width: columns of the terminal. With fewer than `WIDE` an id is shown by the beginning that tells the
            artifacts apart, which every command takes, and a time by the age that `--older-than` takes.
        now: for ages, with a time zone.
    """
    is_wide = width >= WIDE
    digits = ID_LENGTH if is_wide else digits_that_differ(line.artifact for line in report.lines)
    told = IN_DRY_RUN if is_wide else IN_SHORT_DRY_RUN
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what", no_wrap=True)
    table.add_column("artifact", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("made" if is_wide else "age", justify="left" if is_wide else "right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for line in sorted(report.lines, key=lambda line: (ORDER.index(line.action), not line.named)):
        what = told.get(line.action, line.action) if report.dry_run else line.action
        why = "; ".join(line.reasons)
        table.add_row(
            f"[{STYLE[line.action]}]{what}[/]",
            shorten(line.artifact, digits),
            format_bytes(line.bytes),
            line.created_at[:16].replace("T", " ") if is_wide else _age(line, now),
            escape(why if is_wide else MOMENT.sub(r"\1 \2", shorten(why, digits))),
        )
    return table


def digits_that_differ(names: Iterable[str]) -> int:
    """How many digits of the ids, `MIN_DIGITS` at least, tell all of these `KIND/ID` apart."""
    whole = set(names)
    lengths = range(MIN_DIGITS, ID_LENGTH)
    return next((n for n in lengths if len({shorten(name, n) for name in whole}) == len(whole)), ID_LENGTH)


def shorten(text: str, digits: int) -> str:
    """A text with the ids of all artifacts in it cut to their first digits."""
    return NAME.sub(lambda match: f"{match[1]}/{match[2][:digits]}", text)


def age(span: timedelta) -> str:
    """A span in the words of `--older-than`: `45m`, `36h`, `14d`."""
    minutes = max(0, int(span.total_seconds() // 60))
    if minutes < 60:
        return f"{minutes}m"
    return f"{minutes // 60}h" if minutes < 48 * 60 else f"{minutes // (24 * 60)}d"


def _age(line: GcLine, now: datetime) -> str:
    """A dash where it is not known, of an artifact whose manifest cannot be read."""
    try:
        made = datetime.fromisoformat(line.created_at)
    except ValueError:
        return "–"
    return age(now - (made if made.tzinfo else made.replace(tzinfo=UTC)))
