"""From raw output to log lines and progress."""

from __future__ import annotations

import logging

import pytest

from eagle3_core.contracts import ProgressEvent
from eagle3_core.host.lines import MAX_LINE_BYTES, LineSplitter, guess_level, parse_line
from eagle3_core.step import PROGRESS_PREFIX

EVENT = ProgressEvent(step="train", done=1, total=2, unit="steps")
PROGRESS = PROGRESS_PREFIX + EVENT.model_dump_json()


def split(*blocks: bytes) -> list[str]:
    splitter = LineSplitter()
    return [line for block in blocks for line in splitter.feed(block)] + splitter.end()


def test_lines_are_joined_over_blocks_and_the_last_needs_no_newline():
    assert split(b"one\ntw", b"o\n\nthree") == ["one", "two", "", "three"]


def test_of_a_redrawn_progress_bar_the_last_frame_stays():
    assert split(b"\r 10%|#", b"\r 50%|###\r100%|#####\nnext\r\n") == ["100%|#####", "next"]


def test_progress_behind_a_redrawn_bar_is_progress_alone():
    (line,) = split(b"\r 10%|#\r 20%|##" + PROGRESS.encode() + b"\n")
    assert parse_line(line) == (None, EVENT)


def test_progress_behind_other_text_keeps_the_text():
    assert parse_line("loading" + PROGRESS) == ("loading", EVENT)


def test_broken_progress_is_a_log_line():
    assert parse_line(PROGRESS_PREFIX + "{") == (PROGRESS_PREFIX + "{", None)


def test_a_line_without_end_is_cut_and_complete():
    text = b"x" * (3 * MAX_LINE_BYTES)
    assert "".join(split(text[:20000], text[20000:])) == text.decode()


def test_bytes_that_are_no_text_and_colours_do_no_harm():
    assert split(b"\xff\x1b[31mred\x1b[0m\n") == ["\ufffdred"]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("2026-01-01 10:00:00,000 W eagle3_core.x: odd", logging.WARNING),
        ("[rank 1] 2026-01-01 10:00:00,000 W eagle3_core.x: odd", logging.WARNING),
        ("2026-01-01 10:00:00,000 I eagle3_core.x: E is a letter", logging.INFO),
        ("WARNING 01-01 10:00:00 [vllm.py:1] slow", logging.WARNING),
        ("ERROR: broken", logging.ERROR),
        ("Traceback (most recent call last):", logging.ERROR),
        ("step train failed: no data", logging.ERROR),
        ("plain", logging.INFO),
    ],
)
def test_the_level_of_a_line_is_guessed(line, level):
    assert guess_level(line) == level
