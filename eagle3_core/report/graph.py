"""The lineage of a run's artifacts as an SVG graph: what was made from what, from left to right.

Prompt files and the target stand at the left with round corners, artifacts that the store has lost are
dashed, and those that the run made have a dark edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from eagle3_core.lineage import Source
from eagle3_core.report.charts import COLOURS, INK, MUTED, PALE, element, picture, text
from eagle3_core.report.figures import format_bytes
from eagle3_core.report.model import ArtifactSummary

BOX_WIDTH, BOX_HEIGHT = 148.0, 58.0
COLUMN_GAP, ROW_GAP, DETOUR = 34.0, 18.0, 22.0
CORNER, ROUND_CORNER = 5, 18
MAX_NAME = 22


@dataclass(frozen=True)
class _Node:
    """A box: its lines, and by role the boxes that it was made from."""

    kind: str
    name: str
    remark: str
    tooltip: str
    edge: str = PALE
    corner: int = CORNER
    is_dashed: bool = False
    parents: dict[str, str] = field(default_factory=dict)


def lineage_graph(artifacts: Sequence[ArtifactSummary], run_id: str) -> Markup:
    """A box for each artifact, for the prompt files and the target, and for ancestors that are gone.

    Args:
        artifacts: ancestors before what was made from them.
        run_id: the run whose report this is.
    """
    nodes = _nodes(artifacts, run_id)
    columns = _columns(nodes)
    places: dict[str, tuple[float, float]] = {}
    filled: dict[int, int] = {}
    for name in nodes:
        row = filled.get(columns[name], 0)
        filled[columns[name]] = row + 1
        places[name] = (1 + columns[name] * (BOX_WIDTH + COLUMN_GAP), 1 + row * (BOX_HEIGHT + ROW_GAP))
    width = 2 + max(x for x, _ in places.values()) + BOX_WIDTH if places else 0.0
    bottom = 2 + max((y for _, y in places.values()), default=0.0) + BOX_HEIGHT
    edges = [
        _edge(places[parent], places[name], role, bottom + DETOUR / 2)
        for name, node in nodes.items()
        for role, parent in node.parents.items()
    ]
    boxes = [_box(node, places[name]) for name, node in nodes.items()]
    return picture(width, bottom + DETOUR, "Lineage of the artifacts", *edges, *boxes)


def _nodes(artifacts: Sequence[ArtifactSummary], run_id: str) -> dict[str, _Node]:
    """By name: what each artifact was made from before the artifact."""
    nodes: dict[str, _Node] = {}
    for artifact in artifacts:
        for source in artifact.sources.values():
            nodes.setdefault(source.id, _source_node(source))
        for parent in artifact.parents.values():
            gone = _Node(parent.kind, parent.id, "not in the store", f"{parent} is gone", is_dashed=True)
            nodes.setdefault(str(parent), gone)
        nodes[str(artifact.ref)] = _artifact_node(artifact, run_id)
    return nodes


def _source_node(source: Source) -> _Node:
    name = source.name or "name unknown"
    shown = name if len(name) <= MAX_NAME else f"…{name[1 - MAX_NAME :]}"
    return _Node(source.kind, shown, source.hash[:16], f"{name}, {source.hash}", corner=ROUND_CORNER)


def _artifact_node(artifact: ArtifactSummary, run_id: str) -> _Node:
    unfinished = "" if artifact.state == "complete" else ", not complete"
    return _Node(
        kind=artifact.ref.kind,
        name=artifact.ref.id,
        remark=format_bytes(artifact.bytes) + unfinished,
        tooltip=f"{artifact.ref}, made {artifact.created_at} by {artifact.made_by_run}",
        edge=COLOURS[0] if artifact.made_by_run == run_id else PALE,
        parents={role: source.id for role, source in artifact.sources.items()}
        | {role: str(parent) for role, parent in artifact.parents.items()},
    )


def _columns(nodes: dict[str, _Node]) -> dict[str, int]:
    """A box stands one column to the right of its last parent."""
    columns: dict[str, int] = {}
    for name, node in nodes.items():
        columns[name] = 1 + max((columns[parent] for parent in node.parents.values()), default=-1)
    return columns


def _box(node: _Node, place: tuple[float, float]) -> Markup:
    x, y = place
    dashes = {"stroke_dasharray": "4 3"} if node.is_dashed else {}
    frame = element(
        "rect",
        element("title", node.tooltip),
        x=x,
        y=y,
        width=BOX_WIDTH,
        height=BOX_HEIGHT,
        rx=node.corner,
        fill="#ffffff",
        stroke=node.edge,
        stroke_width=1.6,
        **dashes,
    )
    name = element("text", node.name, x=x + 10, y=y + 35, fill=MUTED, font_size=11, font_family="monospace")
    return Markup("").join(
        [
            frame,
            element("text", node.kind, x=x + 10, y=y + 19, fill=INK, font_size=13, font_weight=600),
            name,
            text(x + 10, y + 50, node.remark),
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
