"""Writes docs/compatibility.md from the records in docs/compatibility: `make compatibility`."""

from __future__ import annotations

from pathlib import Path

from eagle3_core.capture.probe_record import compatibility_page, read_records

PAGE = Path(__file__).with_name("compatibility.md")
RECORDS = Path(__file__).with_name("compatibility")


def page() -> str:
    """The whole page."""
    return compatibility_page(read_records(RECORDS))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
