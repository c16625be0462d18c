"""Renders a summary as one self-contained page: no script, no network, charts inline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from eagle3_core.config import RunConfig
from eagle3_core.host.run_folder import StageRecord
from eagle3_core.notices import resumed_at
from eagle3_core.report import charts
from eagle3_core.report.curves import Curve, TrainingCurves
from eagle3_core.report.figures import format_bytes, format_count, format_rate, format_seconds
from eagle3_core.report.graph import lineage_graph
from eagle3_core.report.model import BenchmarkSummary, RunSummary, TrainingSummary

ENDED_BADLY = ("failed", "cancelled", "crashed")
LOSSLESS_MEANING = {
    "identical": "With and without the draft, the target wrote the same tokens for every prompt.",
    "ties": "The outputs differ only where two tokens were equally likely within rounding.",
    "differs": "The outputs differ by more than rounding: do not serve this draft before that is explained.",
}


def render_html(summary: RunSummary, config: RunConfig, curves: TrainingCurves | None = None) -> str:
    """The page of a run, finished or not; parts without figures are left out.

    Args:
        summary: what is known of the run.
        config: its configuration.
        curves: of its training, by step.
    """
    return (
        _environment()
        .get_template("report.html")
        .render(
            run=summary,
            charts=_charts(summary, curves),
            failed_stage=next((stage for stage in summary.stages if stage.state in ENDED_BADLY), None),
            lossless_meaning=LOSSLESS_MEANING,
            speed_text=speed_text(summary.benchmark, config.engine.device) if summary.benchmark else "",
            config_yaml=yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
            device=config.engine.device,
            kept=kept_index(summary.training) if summary.training else None,
            resumed=resumed_text(summary.training) if summary.training else "",
        )
    )


def speed_text(benchmark: BenchmarkSummary, device: str) -> str:
    """What the speed ratio means, said so that nobody takes it for more."""
    ratio = benchmark.speed_ratio
    if ratio is None:
        return "The speed was not measured in this run."
    measured = (
        f"One sequence at a time on this host: {benchmark.draft_tokens_per_second:.1f} tokens/s with the "
        f"draft, {benchmark.baseline_tokens_per_second:.1f} without."
    )
    if ratio >= 1:
        return measured
    if device == "cpu":
        return (
            f"{measured} Here the draft slows the target down. That is expected on a CPU, where checking "
            f"{benchmark.num_speculative_tokens} drafted tokens costs almost as much as decoding them; a GPU "
            "checks them in about the time of one."
        )
    return f"{measured} Here the draft slows the target down: it should not be served as it is."


def resumed_text(training: TrainingSummary) -> str:
    """That training was interrupted and where it went on; empty where it was not."""
    step = training.resumed_from_step
    return "" if step is None else f"Training {resumed_at(step, training.num_planned_steps)}."


def kept_index(training: TrainingSummary) -> int | None:
    """Place of the epoch that was kept among those of the summary, from 0."""
    numbers = [epoch.epoch for epoch in training.epochs]
    return numbers.index(training.best_epoch) if training.best_epoch in numbers else None


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eagle3_core.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "seconds": format_seconds,
        "count": format_count,
        "rate": format_rate,
    }
    return environment


def _charts(summary: RunSummary, curves: TrainingCurves | None) -> dict[str, Markup]:
    """The charts for which there are figures, by name."""
    drawn = {"stages": _stage_chart(summary)}
    if summary.artifacts:
        drawn["disk"] = _disk_chart(summary)
        drawn["lineage"] = lineage_graph(summary.artifacts, summary.run_id)
    if summary.training is not None:
        drawn |= _training_charts(summary, curves)
    if summary.benchmark is not None:
        drawn["acceptance"] = _acceptance_chart(summary, summary.benchmark)
    return drawn


def _stage_chart(summary: RunSummary) -> Markup:
    rows = [(stage.stage, stage.seconds or 0.0, _stage_text(stage), stage.reused) for stage in summary.stages]
    return charts.horizontal_bars("Seconds of each stage", rows)


def _stage_text(stage: StageRecord) -> str:
    if stage.seconds is None:
        return stage.state
    remark = "reused" if stage.reused else "" if stage.state == "completed" else stage.state
    return ", ".join(filter(None, [format_seconds(stage.seconds), remark]))


def _disk_chart(summary: RunSummary) -> Markup:
    rows = [
        (
            artifact.ref.kind,
            float(artifact.bytes),
            format_bytes(artifact.bytes),
            artifact.made_by_run != summary.run_id,
        )
        for artifact in summary.artifacts
    ]
    return charts.horizontal_bars("Bytes of each artifact", rows)


def _training_charts(summary: RunSummary, curves: TrainingCurves | None) -> dict[str, Markup]:
    """By epoch; by step what the metrics say, acceptance only where there are looks within epochs."""
    assert summary.training is not None
    epochs = summary.training.epochs
    marked = kept_index(summary.training)
    losses = [
        charts.Series("training", [epoch.train_loss for epoch in epochs]),
        charts.Series("held-out", [epoch.heldout_loss for epoch in epochs]),
    ]
    lengths = [charts.Series("held-out estimate", [epoch.heldout.acceptance_length for epoch in epochs])]
    drawn = {
        "loss": charts.line_chart("Loss by epoch", losses, marked, digits=3),
        "estimate": charts.line_chart("Estimated acceptance length by epoch", lengths, marked, digits=3),
    }
    if curves is None:
        return drawn
    drawn |= _curve_charts(curves)
    if len(curves.acceptance_length.steps) > len(epochs):
        points = [_points(curves.acceptance_length)]
        drawn["estimate"] = charts.curve_chart("Estimated acceptance length by step", points)
    return drawn


def _curve_charts(curves: TrainingCurves) -> dict[str, Markup]:
    """What has points, over the optimizer steps."""
    lines: dict[str, tuple[str, Sequence[Curve]]] = {
        "loss_by_step": ("Loss by step", [curves.loss, curves.heldout_loss]),
        "agreement": ("Agreement with the target by step", curves.agreement),
        "learning_rate": ("Learning rate by step", [curves.learning_rate]),
        "speed": ("Packed tokens per second by step", [curves.tokens_per_second]),
    }
    drawn = {
        name: charts.curve_chart(label, [_points(curve) for curve in members if curve.steps])
        for name, (label, members) in lines.items()
    }
    return {name: chart for name, chart in drawn.items() if chart}


def _points(curve: Curve) -> charts.Points:
    return charts.Points(curve.name, curve.steps, curve.values)


def _acceptance_chart(summary: RunSummary, benchmark: BenchmarkSummary) -> Markup:
    series = [charts.Series(f"{benchmark.engine} (measured)", benchmark.per_position)]
    if summary.training is not None and summary.agreement is not None:
        series.append(charts.Series("trainer (replay)", summary.training.replay.per_position))
    groups = [f"position {k}" for k in range(1, len(benchmark.per_position) + 1)]
    return charts.grouped_bars("Share of passes in which position k was accepted", groups, series)
