"""What the page, the artifacts and the terminal say of a stage."""

from __future__ import annotations

import io
import logging
from uuid import UUID

import pytest
from rich.console import Console

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.contracts import ProgressEvent
from eagle3_core.errors import DataError, MissingInputError, StepError
from eagle3_core.pipeline import StageError
from eagle3_core.stage_run import StageOutcome

pytestmark = pytest.mark.orchestrator

CAPTURE = ArtifactRef(kind="capture", id="0123456789abcdef")
OUTCOME = StageOutcome(
    stage="extract",
    artifacts=(CAPTURE,),
    seconds=12.3,
    message="made: capture",
    result={"num_tokens": 12345, "rate": 0.123456, "rejected": [{"key": "a"}], "note": "a|b", "none": None},
)


@pytest.fixture
def screen(prefect_home):
    """A terminal that writes to a string."""
    from tasks.terminal import RichTerminal

    text = io.StringIO()
    return RichTerminal(Console(file=text, width=120)), text


def test_a_warning_is_shown_without_its_origin_and_once_if_step_and_run_give_it(screen):
    terminal, text = screen
    terminal.stage_started("benchmark")
    terminal.line("benchmark", "2026-01-02 03:04:05,678 W eagle3_core.serving.acceptance: too low", 30)
    terminal.line("benchmark", "WARNING eagle3_core.serving.acceptance: too low", 30)
    assert text.getvalue().splitlines() == ["benchmark ...", "  too low"]


def test_a_warning_of_another_rank_keeps_its_rank(screen):
    terminal, text = screen
    terminal.line("train", "[rank 1] 2026-01-02 03:04:05,678 W eagle3_core.training.loader: slow", 30)
    assert text.getvalue() == "  [rank 1] slow\n"


def test_a_notice_of_a_step_is_a_line_at_the_terminal_and_other_lines_stay_in_the_log(screen):
    terminal, text = screen
    terminal.stage_started("train")
    terminal.line("train", "2026-01-02 03:04:05,678 I eagle3_core.training.loop: epoch 1 of 8", 20)
    terminal.line("train", "2026-01-02 03:04:05,678 I eagle3_core.notice: resumed at step 7 of 20", 20)
    assert text.getvalue().splitlines() == ["train ...", "  resumed at step 7 of 20"]


def test_progress_is_described_in_words(prefect_home):
    from tasks.reporting import describe

    event = ProgressEvent(step="train", done=640, total=1200, unit="steps", metrics={"loss": 2.3123})
    assert describe(event) == "640 of 1,200 steps, loss 2.312"
    assert describe(event.model_copy(update={"total": None, "metrics": {}})) == "640 steps"
    figures = {"acceptance_length": 2.25, "tokens_per_second": 33300.4, "mfu": 0.4123}
    wanted = "640 of 1,200 steps, acceptance length 2.25, tokens per second 33,300, mfu 0.4123: epoch 2 of 8"
    assert describe(event.model_copy(update={"metrics": figures, "message": "epoch 2 of 8"})) == wanted


def test_the_progress_artifact_of_a_training_shows_its_live_figures(prefect_home, api):
    """Published for the first event, then at most every few seconds, and for the last one."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
    from prefect.runtime import flow_run

    from tasks.reporting import StageReporter

    @flow(name="training")
    def training():
        ran.append(UUID(flow_run.id))
        reporter = StageReporter("train")
        for done in range(1, 6):
            figures = {"loss": 3.0 - done / 10, "acceptance_length": 1.5, "tokens_per_second": 1000.0 * done}
            reporter.progress(
                ProgressEvent(
                    step="train", done=done, total=5, unit="steps", metrics=figures, message="epoch 1 of 1"
                )
            )

    ran = []
    training()
    with get_client(sync_client=True) as client:
        ours = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=ran))
        found = [a for a in client.read_artifacts(artifact_filter=ours) if a.key == "eagle3-train-progress"]
    assert [(artifact.type, artifact.data) for artifact in found] == [("progress", 100.0)]
    expected = "5 of 5 steps, loss 2.5, acceptance length 1.5, tokens per second 5,000: epoch 1 of 1"
    assert found[0].description == expected


def test_the_page_of_a_stage_has_its_artifacts_and_figures(prefect_home):
    from tasks.pages import outcome_markdown

    page = outcome_markdown(OUTCOME, "Captured hidden states")
    assert page.startswith("## Captured hidden states\n")
    assert f"| capture | `{CAPTURE}` |" in page
    assert "| num_tokens | 12,345 |" in page
    assert "| rate | 0.1235 |" in page
    assert "| rejected | 1, listed below |" in page
    assert "| note | a\\|b |" in page
    assert "none" not in page


def test_a_finished_stage_is_one_line(screen):
    terminal, text = screen
    terminal.stage_started("extract")
    terminal.stage_done(OUTCOME)
    terminal.close()
    assert text.getvalue() == "extract ...\n✓ extract      12.3 s  made: capture\n"


def test_the_last_progress_is_shown_before_the_line_of_a_finished_stage(screen, monkeypatch):
    terminal, text = screen
    terminal.stage_started("extract")
    events = [ProgressEvent(step="extract", done=done, total=9, unit="shards") for done in (7, 8, 9)]
    for event, pause in zip(events, (20.0, 0.0, 0.0), strict=True):
        monkeypatch.setattr("tasks.terminal.PLAIN_PROGRESS_SECONDS", 15.0 - pause)
        terminal.progress("extract", event)
    terminal.stage_done(OUTCOME)
    shown = text.getvalue().splitlines()
    assert shown[1:3] == ["  extract: 7 of 9 shards", "  extract: 9 of 9 shards"]
    assert len(shown) == 4


def test_an_engines_warnings_stay_in_the_log_and_errors_show(screen):
    terminal, text = screen
    terminal.line("extract", "WARNING 01-01 [vllm.py:1] chatter", logging.WARNING)
    terminal.line("extract", "W eagle3_core.capture: a shard is slow", logging.WARNING)
    terminal.line("extract", "ERROR [x] broken", logging.ERROR)
    assert text.getvalue() == "  a shard is slow\n  ERROR [x] broken\n"


@pytest.mark.parametrize(
    ("cause", "useful"),
    [
        (StepError("killed", log_path="l"), True),
        (StepError("no", log_path="l", error_type="CaptureError"), True),
        (StepError("no", log_path="l", error_type="DataError"), False),
        (StepError("no", log_path="l", error_type="RankError"), True),
        (StepError("no", log_path="l", error_type="TrainingError"), False),
        (DataError("no"), False),
        (MissingInputError("no"), False),
        (RuntimeError("no"), True),
    ],
)
def test_only_what_may_pass_next_time_is_tried_again(cause, useful):
    assert StageError("train", cause).may_pass_next_time is useful
