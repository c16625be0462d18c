"""Curves of a training, from its metrics to the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.contracts import METRICS_FILE
from eagle3_core.report.curves import MAX_POINTS, read_curves, training_curves
from eagle3_core.report.write import write_report
from eagle3_core.store.local import LocalStore
from tests.report import example

PLAN = ArtifactPlan(kind="checkpoint", identity={"for": "a test"})


def test_curves_have_the_steps_and_values_of_the_records() -> None:
    records = example.metrics()[:59]
    curves = training_curves(records)
    assert curves.loss.steps == tuple(range(1, 59))
    assert curves.loss.values[0] == pytest.approx(6.49)
    assert curves.acceptance_length.steps == (58.0,)
    assert curves.heldout_loss.values == (records[-1]["heldout_loss"],)


def test_many_points_are_averaged_in_groups_of_neighbours() -> None:
    curves = training_curves(example.metrics())
    assert len(curves.loss.steps) == 145 <= MAX_POINTS
    assert curves.loss.steps[:2] == (1.5, 3.5)
    assert curves.loss.values[0] == pytest.approx((6.49 + 6.48) / 2)


def test_what_is_unknown_or_not_finite_leaves_no_point() -> None:
    step = {"type": "step", "step": 1, "learning_rate": 1e-3, "tokens_per_second": None}
    curves = training_curves([{**step, "loss": float("nan")}, {"type": "skipped", "step": 2}])
    assert (curves.loss.steps, curves.tokens_per_second.steps) == ((), ())
    assert curves.learning_rate.steps == (1.0,)


def test_a_checkpoint_without_metrics_has_no_curves_and_a_line_on_its_way_is_left_out(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert read_curves(store, PLAN.ref) is None
    path = store.folder(PLAN.ref) / METRICS_FILE
    path.parent.mkdir(parents=True)
    path.write_text('{"type": "step", "step": 1, "loss": 2.0}\n{"type": "st')
    curves = read_curves(store, PLAN.ref)
    assert curves is not None
    assert curves.loss.values == (2.0,)


def test_agreement_has_a_curve_of_each_ttt_step_and_no_point_where_nothing_was_agreed_with_before() -> None:
    first, second, *_, last = training_curves(example.metrics()[:20]).agreement
    assert (first.name, second.name) == ("k=1", "k=2")
    assert first.values == tuple(step / 500 for step in range(1, 21))
    assert last.steps == ()


def test_the_page_shows_loss_agreement_learning_rate_and_speed_by_step(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    write_report(folder.path, store)
    page = (folder.path / "report.html").read_text()
    labels = ("Loss by step", "Agreement with the target by step", "Learning rate by step")
    for label in (*labels, "Packed tokens per second by step"):
        assert f"<title>{label}</title>" in page
    for name in ("k=1", "k=2", "k=3", "k=4"):
        assert f">{name}<" in page


def test_metrics_that_cannot_be_read_are_a_problem_of_the_report_and_not_its_end(tmp_path: Path) -> None:
    folder, store = example.make_run(tmp_path)
    damaged = next(store.root.glob(f"checkpoint/*/{METRICS_FILE}"))
    damaged.write_text("no json\n")
    summary = write_report(folder.path, store)
    assert any("the metrics of checkpoint/" in problem for problem in summary.problems)
    assert "Loss by epoch" in (folder.path / "report.html").read_text()
