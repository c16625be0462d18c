"""Writes docs/configuration.md from the configuration models: `make docs`."""

from __future__ import annotations

from pathlib import Path

from eagle3_core.config import RunConfig
from flows.inspect_views import fields

PAGE = Path(__file__).with_name("configuration.md")
HEADER = """# Configuration

One YAML profile is one run. Unknown keys are refused, and so are values of a wrong type. Every field below
can be overridden with `--set section.field=value`; `eagle3 config` prints the same list, and
`eagle3 config --json` the JSON schema, with all bounds. A size is a number of bytes or a text such as `1GiB`.
Relative paths are below the checkout. `deployments/profiles/` has profiles to start from.

This page is made from the code by `make docs`.
"""


def page() -> str:
    """The whole page: one table a section, in the order of the models."""
    sections: dict[str, list[str]] = {}
    for row in fields(RunConfig):
        sections.setdefault(row[0].partition(".")[0] if "." in row[0] else "Run", []).append(_row(*row))
    head = "| field | type | default | meaning |\n| --- | --- | --- | --- |\n"
    return HEADER + "".join(f"\n## {name}\n\n{head}{''.join(rows)}" for name, rows in sections.items())


def _row(name: str, kind: str, default: str, meaning: str) -> str:
    shown = default.removeprefix("default ")
    cells = (f"`{name}`", kind, shown if shown == "required" else f"`{shown}`", meaning)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
