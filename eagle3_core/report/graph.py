"""The lineage of a run's artifacts as an SVG graph: what was made from what, from left to right."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.report.charts import COLOURS, INK, MUTED, PALE, element, picture, text
from eagle3_core.report.figures import format_bytes
from eagle3_core.report.model import ArtifactSummary

BOX_WIDTH, BOX_HEIGHT = 148.0, 58.0
COLUMN_GAP, ROW_GAP, DETOUR = 34.0, 18.0, 22.0


def lineage_graph(artifacts: Sequence[ArtifactSummary], run_id: str) -> Markup:
    """A box for each artifact, with its id and size; those that this run made have a dark edge.

    Args:
        artifacts: ancestors before what was made from them.
        run_id: the run whose report this is.
    """
    columns = _columns(artifacts)
    places: dict[ArtifactRef, tuple[float, float]] = {}
    filled: dict[int, int] = {}
    for artifact in artifacts:
        column = columns[artifact.ref]
        row = filled.get(column, 0)
        filled[column] = row + 1
        places[artifact.ref] = (1 + column * (BOX_WIDTH + COLUMN_GAP), 1 + row * (BOX_HEIGHT + ROW_GAP))
    width = 2 + max(x for x, _ in places.values()) + BOX_WIDTH if places else 0.0
    bottom = 2 + max((y for _, y in places.values()), default=0.0) + BOX_HEIGHT
    edges = [
        _edge(places[parent], places[artifact.ref], role, bottom + DETOUR / 2)
        for artifact in artifacts
        for role, parent in artifact.parents.items()
        if parent in places
    ]
    boxes = [_box(artifact, places[artifact.ref], artifact.made_by_run == run_id) for artifact in artifacts]
    return picture(width, bottom + DETOUR, "Lineage of the artifacts", *edges, *boxes)


def _columns(artifacts: Sequence[ArtifactSummary]) -> dict[ArtifactRef, int]:
    """An artifact stands one column to the right of its last parent."""
    columns: dict[ArtifactRef, int] = {}
    for artifact in artifacts:
        parents = [columns[parent] for parent in artifact.parents.values() if parent in columns]
        columns[artifact.ref] = 1 + max(parents, default=-1)
    return columns


def _box(artifact: ArtifactSummary, place: tuple[float, float], is_ours: bool) -> Markup:
    x, y = place
    unfinished = "" if artifact.state == "complete" else ", not complete"
    frame = element(
        "rect",
        element("title", f"{artifact.ref}, made {artifact.created_at} by {artifact.made_by_run}"),
        x=x,
        y=y,
        width=BOX_WIDTH,
        height=BOX_HEIGHT,
        rx=5,
        fill="#ffffff",
        stroke=COLOURS[0] if is_ours else PALE,
        stroke_width=1.6,
    )
    identifier = element(
        "text", artifact.ref.id, x=x + 10, y=y + 35, fill=MUTED, font_size=11, font_family="monospace"
    )
    return Markup("").join(
        [
            frame,
            element("text", artifact.ref.kind, x=x + 10, y=y + 19, fill=INK, font_size=13, font_weight=600),
            identifier,
            text(x + 10, y + 50, format_bytes(artifact.bytes) + unfinished),
        ]
    )


def _edge(start: tuple[float, float], end: tuple[float, float], role: str, below: float) -> Markup:
    """From the right side of a parent to the left side of what was made from it, past boxes in between."""
    x1, y1 = start[0] + BOX_WIDTH, start[1] + BOX_HEIGHT / 2
    x2, y2 = end[0], end[1] + BOX_HEIGHT / 2
    bend = COLUMN_GAP * 0.6
    if x2 - x1 <= COLUMN_GAP + 1:
        path = f"M{x1:g} {y1:g} C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
    else:
        down, up = x1 + COLUMN_GAP / 2, x2 - COLUMN_GAP / 2
        path = (
            f"M{x1:g} {y1:g} Q{down:g} {y1:g} {down:g} {y1 + bend:g} V{below - 8:g} "
            f"Q{down:g} {below:g} {down + 8:g} {below:g} H{up - 8:g} "
            f"Q{up:g} {below:g} {up:g} {below - 8:g} V{y2 + bend:g} Q{up:g} {y2:g} {x2:g} {y2:g}"
        )
    return element("path", element("title", role), d=path, fill="none", stroke=MUTED, stroke_width=1.2)
