"""Short names and ages in the table of gc."""

from __future__ import annotations

from datetime import timedelta

import pytest

from flows.gc_table import age, digits_that_differ, shorten

pytestmark = pytest.mark.orchestrator


def test_ids_are_as_short_as_tells_them_apart():
    assert digits_that_differ(["capture/0123456789abcdef", "export/0123456789abcdef"]) == 8
    assert digits_that_differ(["capture/0123456789abcdef", "capture/0123456789bbcdef"]) == 11
    assert digits_that_differ(["capture/0123456789abcdef"] * 2) == 8
    assert digits_that_differ([]) == 8


def test_every_artifact_that_a_reason_names_is_shortened_and_nothing_else():
    text = "labels/0123456789abcdef of 0123456789abcdef, read from /data/0123456789abcdef"
    assert shorten(text, 8) == "labels/01234567 of 0123456789abcdef, read from /data/0123456789abcdef"


@pytest.mark.parametrize(
    ("minutes", "text"),
    [(-3, "0m"), (59, "59m"), (60, "1h"), (47 * 60 + 59, "47h"), (48 * 60, "2d"), (60 * 24 * 400, "400d")],
)
def test_an_age_is_told_as_the_policies_take_it(minutes, text):
    assert age(timedelta(minutes=minutes)) == text
