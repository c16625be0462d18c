from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from eagle3_core.report.charts import (
    Points,
    Series,
    curve_chart,
    grouped_bars,
    horizontal_bars,
    line_chart,
    nice_ticks,
)

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1.21, 1.58, [1.2, 1.3, 1.4, 1.5, 1.6]), (0.0, 10.0, [0, 2, 4, 6, 8, 10]), (3.0, 3.0, [3.0, 3.1, 3.2])],
)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float, ticks: list[float]) -> None:
    found = nice_ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    if low < high:
        assert found == ticks


def test_a_line_chart_is_one_svg_with_a_point_per_value_and_gaps_left_out() -> None:
    chart = line_chart("loss", [Series("train", [3.0, None, math.nan, 1.0]), Series("held-out", [2.0] * 4)])
    root = ElementTree.fromstring(chart)
    assert root.tag == f"{SVG}svg"
    assert len(root.findall(f"{SVG}circle")) == 2 + 4
    assert "nan" not in chart.lower().replace("nance", "")


def test_a_chart_without_a_finite_value_is_left_out() -> None:
    assert line_chart("loss", [Series("train", [math.nan, None])]) == ""


def test_curves_share_one_axis_and_only_few_points_have_dots() -> None:
    many = Points("training", list(range(100)), [float(x) for x in range(100)])
    chart = curve_chart("loss", [many, Points("held-out", [50, 99], [50.0, 99.0])])
    root = ElementTree.fromstring(chart)
    lines = [line.attrib["points"].split() for line in root.findall(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [100, 2]
    assert lines[1] == [lines[0][50], lines[0][99]]
    assert len(root.findall(f"{SVG}circle")) == 2
    assert curve_chart("loss", [Points("training", [], [])]) == ""
    ElementTree.fromstring(curve_chart("one point", [Points("held-out", [3], [2.0])]))


def test_small_values_keep_their_figures() -> None:
    chart = curve_chart("learning rate", [Points("learning rate", [1, 2, 3, 4], [0.0, 0.00030435, 0.1, 2.0])])
    titles = [title.text for title in ElementTree.fromstring(chart).iterfind(f"{SVG}circle/{SVG}title")]
    assert titles == [f"learning rate: {value}" for value in ("0.000", "0.000304", "0.100", "2.000")]


def test_bars_are_as_high_as_their_values() -> None:
    root = ElementTree.fromstring(grouped_bars("acceptance", ["1", "2"], [Series("vllm", [0.8, 0.2])]))
    bars = [bar for bar in root.findall(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert float(bars[0].attrib["height"]) == pytest.approx(4 * float(bars[1].attrib["height"]), abs=0.05)


def test_text_in_a_chart_is_escaped() -> None:
    chart = horizontal_bars("sizes", [("<script>", 1.0, "a & b", False)])
    assert "<script>" not in chart
    ElementTree.fromstring(chart)
