"""The picture of a run's lineage."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eagle3_core.lineage import sources
from eagle3_core.report.graph import lineage_graph
from eagle3_core.report.model import ArtifactSummary
from eagle3_core.store.local import LocalStore
from tests.store.artifacts import Chain, add_run

pytestmark = pytest.mark.orchestrator
SVG = "{http://www.w3.org/2000/svg}"


def summaries(store: LocalStore, run: Chain) -> list[ArtifactSummary]:
    data = [run.conversations, run.dataset, run.vocabulary, run.capture]
    order = [*data, run.labels, run.checkpoint, run.export]
    return [
        ArtifactSummary(
            ref=ref,
            parents=store.read(ref).parents,
            sources=sources(store.read(ref)),
            state="complete",
            bytes=10,
            num_files=1,
            created_at="t",
            made_by_run="r",
            seconds=None,
            git_commit=None,
        )
        for ref in order
        if ref is not None
    ]


def drawn(artifacts: list[ArtifactSummary]) -> ElementTree.Element:
    return ElementTree.fromstring(str(lineage_graph(artifacts, "r")))


def words(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_it_begins_at_the_prompts_and_the_target_and_has_an_arrow_for_each_role(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    picture = drawn(summaries(store, add_run(store, "a", age_days=1)))
    shown = words(picture)
    assert {"prompts.jsonl", "ORG/NAME", "prompts", "target", "export"} <= set(shown)
    assert len(list(picture.iter(f"{SVG}rect"))) == 9
    roles = sorted(path[0].text or "" for path in picture.iter(f"{SVG}path"))
    twice = 2 * ["target", "dataset", "capture", "vocabulary"]
    assert sorted(roles) == sorted([*twice, "prompts", "conversations", "labels", "checkpoint"])


def test_an_ancestor_that_is_gone_is_dashed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    run = add_run(store, "a", age_days=1)
    artifacts = [one for one in summaries(store, run) if one.ref != run.capture]
    picture = drawn(artifacts)
    dashed = [box for box in picture.iter(f"{SVG}rect") if "stroke-dasharray" in box.attrib]
    assert [box[0].text for box in dashed] == [f"{run.capture} is gone"]
    assert "not in the store" in words(picture)


def test_boxes_do_not_overlap_and_arrows_point_right(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    picture = drawn(summaries(store, add_run(store, "a", age_days=1)))
    corners = [(float(box.attrib["x"]), float(box.attrib["y"])) for box in picture.iter(f"{SVG}rect")]
    assert len(set(corners)) == len(corners)
    for path in picture.iter(f"{SVG}path"):
        numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path.attrib["d"])]
        assert numbers[0] < numbers[-2]
