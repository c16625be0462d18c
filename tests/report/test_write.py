from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eagle3_core.errors import HostError
from eagle3_core.report.html import speed_text
from eagle3_core.report.model import RunSummary
from eagle3_core.report.summary import summarise
from eagle3_core.report.write import write_report
from tests.report import example

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Balance(HTMLParser):
    """Collects the text, the addresses that a browser would load, and fails on unbalanced tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(path: Path) -> Balance:
    page = Balance()
    page.feed(path.read_text())
    assert page.open == []
    page.text = " ".join(page.text.split())
    return page


def test_the_page_leads_with_the_acceptance_length_and_what_it_was_measured_on(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    write_report(folder.path, store)
    text = read_page(folder.path / "report.html").text
    assert text.index("1.60") < text.index("Acceptance by position") < text.index("Training")
    assert "K = 3 drafted tokens per pass; n = 32 held-out prompts" in text
    assert example.BENCHMARK.dataset_hash in text
    assert "0.80×" in text
    assert "of 5 epochs, number 5 was kept" in text
    assert "expected on a CPU" in text


def test_the_page_says_that_training_was_resumed_and_stopped_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "resumed_from_step": 1200,
        "num_planned_steps": 4000,
        "early_stop": "stopped early at step 9: why",
    }
    trained = example.TRAIN.model_copy(update=told)
    made = [tuple(trained if part is example.TRAIN else part for part in row) for row in example.KINDS]
    monkeypatch.setattr(example, "KINDS", made)
    folder, store = example.make_run(tmp_path)
    write_report(folder.path, store)
    text = read_page(folder.path / "report.html").text
    assert "Training resumed at step 1,200 of 4,000. Stopped early at step 9: why." in text
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["training"]["resumed_from_step"] == 1200


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    write_report(folder.path, store)
    page = read_page(folder.path / "report.html")
    assert page.loaded == ["data:,"]
    source = (folder.path / "report.html").read_text()
    assert "<script" not in source
    assert not re.search(r"url\(|@import", source)
    assert source.count("<svg") == 10


def test_text_from_data_is_escaped(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    write_report(folder.path, store)
    source = (folder.path / "report.html").read_text()
    assert "&lt;b&gt;odd&lt;/b&gt;" in source
    assert "<b>odd" not in source


def test_the_summary_file_reads_back_as_what_was_returned(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    written = write_report(folder.path, store)
    assert RunSummary.model_validate(json.loads((folder.path / "summary.json").read_text())) == written


def test_the_running_report_stage_counts_as_done(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path, state="running")
    folder.update_stage("report", state="running", started_at=datetime.now(UTC), seconds=None)
    stage = write_report(folder.path, store).stages[-1]
    assert (stage.stage, stage.state) == ("report", "completed")
    assert stage.seconds is not None


@pytest.mark.parametrize(("ratio", "words"), [(1.7, ""), (0.8, "expected on a CPU"), (None, "not measured")])
def test_the_speed_is_explained_where_it_is_low(ratio: float | None, words: str, tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    benchmark = summarise(folder.path, store).benchmark
    assert benchmark is not None
    found = speed_text(benchmark.model_copy(update={"speed_ratio": ratio}), "cpu")
    assert words in found
    assert ("slows" in found) == (ratio == 0.8)


@pytest.mark.parametrize("until", ["preflight", "prepare", "extract", "verify", "train", "benchmark"])
def test_a_run_that_failed_at_any_stage_has_a_page_that_says_why(tmp_path: Path, until: str) -> None:
    reason = f"stage {until} failed: out of <luck>"
    folder, store = example.make_run(tmp_path, until=until, failure=reason)  # type: ignore[arg-type]
    write_report(folder.path, store)
    text = read_page(folder.path / "report.html").text
    assert f"The stage {until} failed" in text
    assert reason in text


def test_a_rehearsal_is_called_one(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path, limit=10)
    assert write_report(folder.path, store).is_rehearsal
    assert "A rehearsal." in read_page(folder.path / "report.html").text


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    (folder.path / "report.html").mkdir()
    with pytest.raises(HostError, match="cannot write the report into"):
        write_report(folder.path, store)


def test_what_was_planned_is_shown_by_file_system(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    system = {
        "key": "1", "mount": "/data", "new_bytes": 1 << 20, "need_bytes": 3 << 20, "free_bytes": 5 << 30,
        "reserve_bytes": 2 << 30, "reserved": {"another-run": 1 << 30},
        "items": [
            {"what": "capture/x", "stage": "extract", "path": "/data", "bytes": 1 << 20,
             "peak_bytes": 1 << 20}
        ],
    }  # fmt: skip
    folder.update_stage("plan", details={"file_systems": [system]})
    write_report(folder.path, store)
    text = read_page(folder.path / "report.html").text
    assert "/data: at most 3.0 MiB at once, of 5.0 GiB that were free; 2.0 GiB had to stay free" in text
    assert "1.0 GiB reserved by another-run" in text
