"""Lines that are shown at the terminal though nothing is wrong."""

from __future__ import annotations

import logging

import pytest

from eagle3_core.notices import NOTICES, give_notice, is_notice, resumed_at
from eagle3_core.step import LOG_FORMAT

pytestmark = pytest.mark.both


@pytest.mark.parametrize("form", [LOG_FORMAT, "%(levelname)s %(name)s: %(message)s"])
def test_a_notice_is_known_by_its_line_in_a_step_and_in_this_process(form, caplog):
    with caplog.at_level(logging.INFO, logger=NOTICES):
        give_notice("resumed at step 7 of 20")
    (record,) = caplog.records
    line = logging.Formatter(form).format(record)
    assert line.endswith("eagle3_core.notice: resumed at step 7 of 20")
    assert is_notice(line)


@pytest.mark.parametrize(
    "line",
    [
        "2026-01-02 03:04:05,678 I eagle3_core.training.loop: a notice: nothing",
        "INFO eagle3_core.notices: x",
        "(vllm) said eagle3_core.notice: x",
        "eagle3_core.notice",
    ],
)
def test_no_other_line_is_one(line):
    assert not is_notice(line)


def test_where_training_went_on_is_said_with_its_end_where_that_is_known():
    assert resumed_at(1200, 4000) == "resumed at step 1,200 of 4,000"
    assert resumed_at(7, None) == "resumed at step 7"
