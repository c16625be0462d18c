"""`metrics.jsonl` after a resume: no record twice, and the mirror shows the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eagle3_core.errors import StoreError
from eagle3_core.training.metrics_log import MetricsLog, read_records

pytestmark = pytest.mark.engine


class Shown:
    """A mirror that remembers."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = [{"of": "an earlier attempt"}]

    def restart(self, records: Iterable[dict[str, Any]]) -> None:
        self.records = list(records)

    def add(self, records: Iterable[dict[str, Any]]) -> None:
        self.records += records


def test_metrics_are_cut_back_to_the_checkpoint_and_so_is_the_mirror(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append([{"step": 1}, {"step": 2}])
    length = log.sync()
    log.append([{"step": 3}])
    log.close()
    shown = Shown()
    log = MetricsLog(tmp_path, shown)
    log.cut(length)
    log.append([{"step": 3, "again": True}])
    log.close()
    wanted = [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert read_records(tmp_path / "metrics.jsonl") == shown.records == wanted


def test_who_is_taken_over_while_it_stands_still_adds_nothing(tmp_path: Path) -> None:
    still = MetricsLog(tmp_path)
    still.append([{"step": 1}])
    log = MetricsLog(tmp_path)
    log.cut(still.sync())
    still.append([{"step": 2}])
    log.append([{"step": 2, "again": True}])
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2, "again": True}]


def test_a_file_that_is_shorter_than_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"has 0 bytes, the checkpoint was made at 9,999"):
        MetricsLog(tmp_path).cut(9999)


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1}]
