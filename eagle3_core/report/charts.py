"""Charts as inline SVG, drawn by hand: no plotting library, no script, and they scale when printed.

All functions return markup that is safe to put into a page; every text in it is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from markupsafe import Markup, escape

FONT = 12
INK, MUTED, GRID = "#1d2733", "#5f6c7b", "#e4e8ed"
COLOURS = ("#2563eb", "#e08a1e", "#3f9a6b", "#9a3f8c", "#5a6b7d", "#c0392b", "#1f9aa8", "#8a6d1f")
"""Of lines and bars in their order; more begin again."""
PALE = "#c9d6ea"
MAX_DOTS = 40
"""A line with more points has no dots on it."""


@dataclass(frozen=True)
class Series:
    """A named row of values; None leaves a gap."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Points:
    """A named line through points, by increasing x."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]


def element(tag: str, content: object = "", **attributes: object) -> Markup:
    """One SVG element; `_` in attribute names becomes `-`, content and values are escaped."""
    pairs = Markup("").join(
        Markup(' {}="{}"').format(name.strip("_").replace("_", "-"), _number(value))
        for name, value in attributes.items()
    )
    return Markup("<{}{}>{}</{}>").format(Markup(tag), pairs, escape(content), Markup(tag))


def text(x: float, y: float, content: object, anchor: str = "start", colour: str = MUTED) -> Markup:
    """A label with its baseline at y."""
    return element("text", content, x=x, y=y, text_anchor=anchor, fill=colour, font_size=FONT)


def picture(width: float, height: float, label: str, *parts: Markup) -> Markup:
    """The SVG around the parts of a chart; `label` is what a screen reader says."""
    body = Markup("").join([element("title", label), *parts])
    return element(
        "svg",
        body,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        width=width,
        xmlns="http://www.w3.org/2000/svg",
    )


def line_chart(label: str, series: Sequence[Series], marked: int | None = None, digits: int = 2) -> Markup:
    """Lines over the epochs 1, 2, ...; `marked` is the index of the epoch to point out."""
    width, height, left, right, top, bottom = 460.0, 250.0, 46.0, 14.0, 34.0, 40.0
    known = [value for row in series for value in row.values if value is not None and math.isfinite(value)]
    if not known:
        return Markup("")
    ticks = nice_ticks(min(known), max(known))
    low, high = ticks[0], ticks[-1]
    count = max(len(row.values) for row in series)

    def x_of(index: int) -> float:
        return left + (width - left - right) * (index / (count - 1) if count > 1 else 0.5)

    def y_of(value: float) -> float:
        return top + (height - top - bottom) * (1 - (value - low) / (high - low))

    parts = [_horizontal_grid(ticks, y_of, left, width - right)]
    every = math.ceil(count / 12)
    parts += [text(x_of(i), height - 24, i + 1, "middle") for i in range(count) if i % every == 0]
    parts.append(text(left + (width - left - right) / 2, height - 6, "epoch", "middle"))
    if marked is not None:
        parts.append(_marker_line(x_of(marked), top, height - bottom, is_left=marked < count / 2))
    for row, colour in zip(series, cycle(COLOURS), strict=False):
        points = [
            (x_of(i), y_of(value), value)
            for i, value in enumerate(row.values)
            if value is not None and math.isfinite(value)
        ]
        parts += _line(points, row.name, colour, digits)
    return picture(width, height, label, *parts, legend([row.name for row in series], left))


def curve_chart(label: str, lines: Sequence[Points], x_name: str = "step", digits: int = 3) -> Markup:
    """Lines over a common x axis; empty where there is no point."""
    width, height, left, right, top, bottom = 460.0, 250.0, 56.0, 14.0, 34.0, 40.0
    xs, ys = [x for line in lines for x in line.xs], [y for line in lines for y in line.ys]
    if not xs:
        return Markup("")
    ticks, low_x, high_x = nice_ticks(min(ys), max(ys)), min(xs), max(xs)
    low, high, span = ticks[0], ticks[-1], high_x - low_x

    def x_of(value: float) -> float:
        return left + (width - left - right) * ((value - low_x) / span if span else 0.5)

    def y_of(value: float) -> float:
        return top + (height - top - bottom) * (1 - (value - low) / (high - low))

    parts = [_horizontal_grid(ticks, y_of, left, width - right)]
    shown = [tick for tick in nice_ticks(low_x, high_x) if low_x <= tick <= high_x] if span else [low_x]
    parts += [text(x_of(tick), height - 24, f"{tick:,.10g}", "middle") for tick in shown]
    parts.append(text(left + (width - left - right) / 2, height - 6, x_name, "middle"))
    for line, colour in zip(lines, cycle(COLOURS), strict=False):
        points = [(x_of(x), y_of(y), y) for x, y in zip(line.xs, line.ys, strict=True)]
        parts += _line(points, line.name, colour, digits)
    return picture(width, height, label, *parts, legend([line.name for line in lines], left))


def grouped_bars(label: str, groups: Sequence[str], series: Sequence[Series]) -> Markup:
    """Bars from 0 to 1 for each group, one a series, with their values above."""
    width, height, left, top, bottom = 460.0, 250.0, 46.0, 34.0, 34.0
    slot = (width - left - 14) / len(groups)
    bar = min(54.0, slot * 0.8 / len(series))

    def y_of(value: float) -> float:
        return top + (height - top - bottom) * (1 - value)

    parts = [_horizontal_grid([0, 0.25, 0.5, 0.75, 1.0], y_of, left, width - 14)]
    for g, group in enumerate(groups):
        centre = left + slot * (g + 0.5)
        parts.append(text(centre, height - 14, group, "middle"))
        for s, (row, colour) in enumerate(zip(series, cycle(COLOURS), strict=False)):
            value = row.values[g]
            if value is None:
                continue
            x = centre + bar * (s - len(series) / 2)
            title = element("title", f"{row.name}, {group}: {value:.3f}")
            parts.append(
                element(
                    "rect",
                    title,
                    x=x + 1,
                    y=y_of(value),
                    width=bar - 2,
                    height=max(0.5, y_of(0) - y_of(value)),
                    rx=2,
                    fill=colour,
                )
            )
            if bar >= 26:
                parts.append(text(x + bar / 2, y_of(value) - 5, f"{value:.2f}", "middle", INK))
    return picture(width, height, label, *parts, legend([row.name for row in series], left))


def horizontal_bars(label: str, rows: Sequence[tuple[str, float, str, bool]]) -> Markup:
    """A bar a row: name, value, the value as text, and whether it is pale (reused, not made)."""
    width, left, line = 460.0, 96.0, 26.0
    greatest = max((value for _, value, _, _ in rows), default=0.0) or 1.0
    parts = []
    for index, (name, value, shown, is_pale) in enumerate(rows):
        y = index * line + 4
        length = max(1.5, (width - left - 118) * value / greatest) if value else 0.0
        parts.append(text(left - 8, y + 14, name, "end", INK))
        parts.append(
            element(
                "rect",
                element("title", f"{name}: {shown}"),
                x=left,
                y=y,
                width=length,
                height=line - 8,
                rx=2,
                fill=PALE if is_pale else COLOURS[0],
            )
        )
        parts.append(text(left + length + 6, y + 14, shown))
    return picture(width, len(rows) * line + 6, label, *parts)


def legend(names: Sequence[str], left: float) -> Markup:
    """Colour keys in one line at the top."""
    parts, x = [], left
    for name, colour in zip(names, cycle(COLOURS), strict=False):
        parts.append(element("rect", x=x, y=6, width=11, height=11, rx=2, fill=colour))
        parts.append(text(x + 16, 16, name, colour=INK))
        x += 16 + 7 * len(name) + 18
    return Markup("").join(parts)


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` round numbers that enclose [low, high]."""
    span = high - low or max(abs(high), 1.0) * 0.1
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if span / (factor * power) <= wanted)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def _horizontal_grid(
    ticks: Sequence[float], y_of: Callable[[float], float], left: float, right: float
) -> Markup:
    lines = [element("line", x1=left, x2=right, y1=y_of(t), y2=y_of(t), stroke=GRID) for t in ticks]
    labels = [text(left - 7, y_of(t) + 4, f"{t:g}", "end") for t in ticks]
    return Markup("").join(lines + labels)


def _line(points: list[tuple[float, float, float]], name: str, colour: str, digits: int) -> list[Markup]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    line = element("polyline", points=path, fill="none", stroke=colour, stroke_width=2)
    if len(points) > MAX_DOTS:
        return [line]
    dots = [
        element("circle", element("title", f"{name}: {_shown(value, digits)}"), cx=x, cy=y, r=3, fill=colour)
        for x, y, value in points
    ]
    return [line, *dots]


def _shown(value: float, digits: int) -> str:
    """So many decimals, or where few of them would not be zeros, as of a learning rate, as many figures."""
    return f"{value:.{digits}g}" if 0 < abs(value) < 10 ** (1 - digits) else f"{value:.{digits}f}"


def _marker_line(x: float, top: float, bottom: float, is_left: bool) -> Markup:
    """Points out the epoch that was kept; the word stands on the side where there is room."""
    line = element("line", x1=x, x2=x, y1=top, y2=bottom, stroke=MUTED, stroke_dasharray="3 3")
    return line + text(x + (4 if is_left else -4), top + 10, "kept", "start" if is_left else "end")


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
