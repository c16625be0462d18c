from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.errors import HostError
from eagle3_core.report.summary import acceptance_agreement, summarise
from eagle3_core.store.local import LocalStore
from tests.report import example


def test_a_finished_run_has_every_figure(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    summary = summarise(folder.path, store)

    assert (summary.run_id, summary.profile, summary.state) == (example.RUN_ID, "example", "completed")
    assert summary.seconds == pytest.approx(sum(example.SECONDS.values()))
    assert summary.prepare == example.PREPARE
    assert summary.verification == example.VERIFY
    assert summary.capture is not None
    assert (summary.capture.tokens, summary.capture.tokens_per_second) == (61_000, 2000.0)
    assert summary.training is not None
    assert [round(e.heldout.acceptance_length, 3) for e in summary.training.epochs] == [
        1.289, 1.448, 1.52, 1.549, 1.556,
    ]  # fmt: skip
    bench = summary.benchmark
    assert bench is not None
    assert bench.acceptance_length == pytest.approx(1.6)
    assert (bench.num_speculative_tokens, bench.num_prompts, bench.lossless) == (3, 32, "ties")
    assert (bench.num_ties, bench.num_different, bench.speed_ratio) == (1, 0, 0.8)
    assert not summary.problems


def test_artifacts_come_after_what_they_were_made_from(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    artifacts = summarise(folder.path, store).artifacts
    assert len(artifacts) == len(example.KINDS)
    seen = set()
    for artifact in artifacts:
        assert set(artifact.parents.values()) <= seen
        seen.add(artifact.ref)


def test_agreement_compares_accepted_drafts_and_the_first_position() -> None:
    found = acceptance_agreement(example.REPLAY_FIGURES, example.ENGINE_FIGURES)
    assert found.accepted_ratio == pytest.approx(0.63 / 0.60)
    assert found.first_position_difference == pytest.approx(0.02)


def test_agreement_with_an_engine_that_accepted_nothing_has_no_ratio() -> None:
    nothing = example.acceptance([0.0, 0.0, 0.0], [0.0, None, None], 10)
    assert acceptance_agreement(example.REPLAY_FIGURES, nothing).accepted_ratio is None


def test_a_failed_run_has_the_figures_up_to_the_failure(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path, until="train", failure="stage train failed: no luck")
    summary = summarise(folder.path, store)
    assert (summary.state, summary.message) == ("failed", "stage train failed: no luck")
    assert summary.verification == example.VERIFY
    assert summary.training is None
    assert summary.benchmark is None
    assert summary.agreement is None


def test_a_run_that_is_being_reported_counts_as_its_other_stages(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path, state="running")
    folder.update_stage("report", state="running")
    assert summarise(folder.path, store).state == "completed"
    folder.update_stage("train", state="running")
    assert summarise(folder.path, store).state == "running"


def test_an_artifact_that_was_deleted_is_named_and_the_rest_is_summarised(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    capture = next(a.ref for a in summarise(folder.path, store).artifacts if a.ref.kind == "capture")
    (store.folder(capture) / "manifest.json").unlink()
    summary = summarise(folder.path, store)
    assert any(str(capture) in problem for problem in summary.problems)
    assert summary.capture is None
    assert summary.benchmark is not None


def test_a_folder_that_is_no_run_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(HostError, match=str(tmp_path)):
        summarise(tmp_path, LocalStore(tmp_path))
