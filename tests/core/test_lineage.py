"""The graph from an artifact back to prompts and target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eagle3_core.errors import StoreError
from eagle3_core.lineage import Lineage, find_artifact, to_dot, trace
from eagle3_core.sections import RetentionConfig
from eagle3_core.store.collect import collect_garbage
from eagle3_core.store.local import LocalStore
from tests.store.artifacts import NOW, PROMPTS, add, add_run


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_it_ends_at_the_prompt_files_and_the_target_each_with_name_and_hash(store):
    run = add_run(store, "a", age_days=1)
    lineage = trace(store, run.benchmark)
    assert {node.id for node in lineage.nodes if node.state != "outside"} == {
        str(ref) for ref in run.refs - {run.verification}
    }
    outside = {node.kind: (node.name, node.hash) for node in lineage.nodes if node.state == "outside"}
    assert outside == {"prompts": ("prompts.jsonl", PROMPTS), "target": ("ORG/NAME", "t")}
    assert lineage.node("target/t").identity["revision"] == "main"
    users = {edge.child for edge in lineage.edges if edge.parent == "target/t"}
    assert users == {str(run.conversations), str(run.capture)}
    assert lineage.missing == []


def test_ancestors_come_before_what_was_made_from_them_and_each_once(store):
    run = add_run(store, "a", age_days=1)
    lineage = trace(store, run.benchmark)
    order = [node.id for node in lineage.nodes]
    assert len(order) == len(set(order))
    assert all(order.index(edge.parent) < order.index(edge.child) for edge in lineage.edges)


def test_each_artifact_names_its_making_and_the_configuration_that_still_exists(store, tmp_path):
    run = add_run(store, "a", age_days=1)
    run_id = store.read(run.export).provenance.run_id
    config = tmp_path / "runs" / run_id / "config.yaml"
    making = trace(store, run.export, tmp_path).node(str(run.export)).making
    assert (making.run_id, making.run_config) == (run_id, None)
    assert making.python
    config.parent.mkdir(parents=True)
    config.write_text("name: demo\n")
    node = trace(store, run.export, tmp_path).node(str(run.export))
    assert node.making.run_config == str(config)
    assert node.identity == {"name": "a"}


def test_a_missing_ancestor_is_in_the_graph_and_one_in_the_trash_goes_on(store):
    run = add_run(store, "a", age_days=1)
    collect_garbage(store, RetentionConfig(), forced={run.capture}, now=NOW)
    assert trace(store, run.export).node(str(run.capture)).state == "in trash"
    assert trace(store, run.export).missing == []
    for entry in store.trash().entries():
        store.trash().purge(entry)
    lineage = trace(store, run.export)
    assert lineage.missing == [str(run.capture)]
    assert lineage.parents(str(run.capture)) == {}
    (store.folder(run.vocabulary) / "manifest.json").write_text("{")
    assert trace(store, run.export).node(str(run.vocabulary)).problem


def test_the_json_reads_back_and_the_dot_is_a_graph_that_is_the_same_each_time(store):
    run = add_run(store, "a", age_days=1)
    lineage = trace(store, run.benchmark)
    assert Lineage.model_validate_json(lineage.model_dump_json()) == lineage
    dot = to_dot(lineage)
    assert dot == to_dot(trace(store, run.benchmark))
    assert dot.startswith("digraph lineage {\n")
    assert dot.endswith("}\n")
    statement = re.compile(
        r'^  (rankdir=LR|node \[.*\]|"(\\.|[^"\\])*"( -> "(\\.|[^"\\])*")? \[label="(\\.|[^"\\])*".*\]);$'
    )
    assert all(statement.match(line) for line in dot.splitlines()[1:-1])
    assert f'  "{run.export}" -> "{run.benchmark}" [label="export"];' in dot.splitlines()


def test_the_name_of_a_source_is_no_artifact_and_what_was_made_from_it_is_named(store):
    run = add_run(store, "a", age_days=1)
    (store.folder(run.export) / "manifest.json").write_text("{")
    made = f"{run.capture}, {run.conversations}"
    with pytest.raises(StoreError, match=rf"target/t is the fingerprint of a target.*directly: {made}; ask"):
        find_artifact(store, "target/t")
    with pytest.raises(StoreError, match=rf"hash of a prompt file.*directly: {run.conversations}; ask for"):
        find_artifact(store, f"prompts/{PROMPTS[:16]}")
    with pytest.raises(StoreError, match=r"target/u is .*directly: nothing"):
        find_artifact(store, "target/u")
    with pytest.raises(StoreError) as unknown:
        find_artifact(store, "exports/12")
    assert "target" not in str(unknown.value)


def test_old_manifests_without_names_of_prompt_files_have_their_hashes(store):
    run = add_run(store, "a", age_days=1)
    path = store.folder(run.conversations) / "manifest.json"
    manifest = store.read(run.conversations)
    path.write_text(manifest.model_copy(update={"facts": {}}).model_dump_json())
    prompts = trace(store, run.dataset).node(f"prompts/{PROMPTS[:16]}")
    assert (prompts.name, prompts.hash) == (None, PROMPTS)


def test_no_name_names_no_artifact_even_where_there_is_only_one(store):
    ref = add(store, "export", {}).ref
    with pytest.raises(StoreError, match=r"no artifact in .* begins with ''"):
        find_artifact(store, "")
    assert find_artifact(store, ref.id[:4]) == ref


def test_an_artifact_is_found_by_the_beginning_of_its_id(store):
    run = add_run(store, "a", age_days=1)
    assert find_artifact(store, run.export.id[:10]) == run.export
    assert find_artifact(store, f"export/{run.export.id[:3]}") == run.export
    assert find_artifact(store, str(run.export)) == run.export
    with pytest.raises(StoreError, match=r"no artifact in .* begins with 'capture/"):
        find_artifact(store, f"capture/{run.export.id[:15]}")
    with pytest.raises(StoreError, match=r"names no artifact"):
        find_artifact(store, "exports/12")
    with pytest.raises(StoreError, match=r"no artifact in .* begins with"):
        find_artifact(store, "")
