"""Garbage collection in a bucket: only manifests move, objects go with the purge, and kills lose nothing."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan, ArtifactRef, Manifest
from eagle3_core.config import PROJECT_ROOT, ObjectRoot
from eagle3_core.errors import EXIT_OK, EXIT_USER_ERROR, StoreError
from eagle3_core.lineage import trace
from eagle3_core.sections import ObjectStoreConfig, RetentionConfig
from eagle3_core.store.collect import GcReport, collect_garbage, restore
from eagle3_core.store.files import file_entry
from eagle3_core.store.locks import folder_lock
from eagle3_core.store.remote import RemoteStore
from eagle3_core.store.trash import find_entry
from eagle3_core.store.uses import RunUse, current_uses, end_use
from tests.doubles.s3 import BUCKET, S3
from tests.kills import num_kills
from tests.store.artifacts import NOW, Chain, add_run

pytestmark = pytest.mark.orchestrator

OLD = RetentionConfig(older_than_days=14)
NOTHING = RetentionConfig()
LATER = NOW + timedelta(days=3650)
KILLS = num_kills() // 8
CHILD = """
import sys
from pathlib import Path
from datetime import timedelta
from tests.store.test_collect_remote import LATER, NOTHING, OLD, NOW, bucket_store
from eagle3_core.store.collect import collect_garbage
store = bucket_store(sys.argv[1], Path(sys.argv[2]))
store.refs()
print("begun", flush=True)
collect_garbage(store, OLD, now=NOW)
collect_garbage(store, NOTHING, purge_after_days=0, now=LATER)
"""


def bucket_store(url: str, mirror: Path) -> RemoteStore:
    settings = ObjectStoreConfig(endpoint_url=url, region="us-east-1", part_bytes=5 << 20)  # type: ignore[arg-type]
    return RemoteStore(ObjectRoot(BUCKET, "store"), mirror, settings)


def two_runs(store: RemoteStore) -> tuple[Chain, Chain]:
    """An old run that a newer one replaces."""
    old = add_run(store, "a", age_days=30, upto="verification")
    return old, add_run(store, "b", age_days=1, upto="verification")


@pytest.fixture
def store(s3: S3, tmp_path: Path) -> RemoteStore:
    return bucket_store(s3.url, tmp_path / "mirror")


@pytest.fixture
def runs(store: RemoteStore) -> tuple[Chain, Chain]:
    return two_runs(store)


def gc(store: RemoteStore, policy: RetentionConfig = OLD, **given: object) -> GcReport:
    return collect_garbage(store, policy, now=given.pop("now", NOW), **given)  # type: ignore[arg-type]


def objects_of(s3: S3, ref: ArtifactRef) -> list[str]:
    return sorted(key.rpartition("/")[2] for key in s3.keys(f"store/{ref}/"))


def test_only_the_manifest_moves_and_the_objects_go_with_the_purge(s3, store, runs):
    old, new = runs
    gc(store)
    assert set(store.refs()) == new.refs
    assert objects_of(s3, old.capture) == ["content.bin"]
    assert {entry.ref for entry in store.trash().entries()} == old.refs
    gc(store, NOTHING, purge_after_days=0, now=LATER)
    assert objects_of(s3, old.capture) == []
    assert not any(key.startswith("store/trash/") for key in list(s3.keys()))
    assert not store.folder(old.capture).exists()
    assert store.is_intact(new.capture)


def test_an_artifact_comes_back_with_its_manifest_and_its_lineage_says_where_it_is(store, runs):
    old, _ = runs
    before = store.read(old.capture)
    gc(store)
    graph = trace(store, old.verification)
    assert graph.node(str(old.capture)).state == "in trash"
    assert {node.name for node in graph.nodes if node.state == "outside"} == {"prompts.jsonl", "ORG/NAME"}
    restore(store, find_entry(store.trash().entries(), str(old.capture)))
    assert store.read(old.capture) == before
    assert store.is_intact(old.capture)


def test_a_run_in_progress_is_seen_by_every_host_of_the_bucket(s3, store, runs, tmp_path):
    old, _ = runs
    with RunUse("r") as use:
        use.say(store, [old.capture])
    other = bucket_store(s3.url, tmp_path / "other")
    assert [use.run_id for use in current_uses(other)] == ["r"]
    assert {old.capture, old.verification, old.dataset} <= set(store.refs())
    gc(other)
    assert {old.capture, old.verification, old.dataset} <= set(store.refs())
    end_use(store, "r")
    gc(other)
    assert not set(store.refs()) & old.refs


def test_a_note_that_is_touched_while_it_is_removed_does_not_come_back(store, monkeypatch):
    notes = store.notes("uses")
    notes.write("r.json", "{}")
    get = store.client.get_bytes

    def get_and_remove(key: str):
        found = get(key)
        notes.remove("r.json")
        return found

    monkeypatch.setattr(store.client, "get_bytes", get_and_remove)
    notes.touch("r.json")
    monkeypatch.undo()
    assert notes.read("r.json") is None


def begin_anew(store: RemoteStore, manifest: Manifest, content: bytes) -> None:
    """As a run that is interrupted after one file."""
    plan = ArtifactPlan(kind=manifest.ref.kind, identity=manifest.identity, parents=manifest.parents)
    assert plan.ref == manifest.ref
    with store.writer(plan) as writer:
        path = writer.folder / "content.bin"
        path.write_bytes(content)
        writer.record(file_entry(writer.folder, path))


def test_what_was_begun_anew_by_mistake_and_stopped_does_not_keep_the_whole_one_from_coming_back(store, runs):
    old, _ = runs
    before = store.read(old.dataset)
    content = store.client.get_bytes(f"{old.dataset}/content.bin")
    gc(store)
    begin_anew(store, before, content[0])
    gc(store, NOTHING, forced=[old.dataset])
    trash = store.trash()
    restore(store, find_entry(trash.entries(), str(old.dataset), trash.manifest))
    assert store.read(old.dataset) == before
    assert store.is_intact(old.dataset)


def test_a_manifest_whose_objects_were_replaced_is_not_restored(store, runs):
    old, _ = runs
    before = store.read(old.dataset)
    gc(store)
    begin_anew(store, before, b"another")
    gc(store, NOTHING, forced=[old.dataset])
    trash = store.trash()
    entry = find_entry(trash.entries(), str(old.dataset), trash.manifest)
    with pytest.raises(StoreError, match=r"cannot be restored: .*7 bytes.*; run the stage that makes"):
        restore(store, entry)
    assert store.find(old.dataset) is None
    assert entry in trash.entries()


def test_a_purge_leaves_the_folder_of_a_writer_that_waits_for_it(store, runs):
    old, _ = runs
    gc(store)
    with folder_lock(store.folder(old.dataset)) as lock:
        gc(store, NOTHING, purge_after_days=0, now=LATER)
        lock.check()
    assert store.trash().entries() == []
    assert not store.folder(old.conversations).exists()


def test_a_purge_that_ended_half_way_cannot_be_restored_and_is_finished(s3, store, runs):
    old, _ = runs
    gc(store)
    entry = find_entry(store.trash().entries(), str(old.capture))
    store.client.put_bytes(f"trash/.purging-{entry.name}", b"")
    store.client.delete([f"trash/{entry.name}", f"{old.capture}/content.bin"])
    assert old.capture not in {one.ref for one in store.trash().entries()}
    gc(store, NOTHING)
    assert not any(".purging" in key for key in list(s3.keys()))


def test_the_commands_work_on_a_bucket_that_the_environment_names(
    s3, store, runs, capsys, monkeypatch, tmp_path
):
    from flows.cli import main

    old, new = runs
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    place = ["--store", f"s3://{BUCKET}/store", "--workspace", str(tmp_path / "workspace")]
    assert main(["lineage", str(new.verification), *place, "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["store"] == f"s3://{BUCKET}/store"
    assert main(["gc", *place, "--older-than", "1d", "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["trashed_bytes"] == 50
    assert main(["verify", str(new.dataset), *place, "--deep"]) == EXIT_OK
    store.client.put_bytes(f"{new.dataset}/content.bin", b"another")
    assert main(["verify", str(new.dataset), *place]) == EXIT_USER_ERROR
    assert "content.bin" in capsys.readouterr().out
    assert main(["verify", str(old.dataset), *place]) == EXIT_USER_ERROR


def test_killed_at_random_moments_it_loses_nothing_that_stays(s3, tmp_path):
    for number in range(KILLS):
        s3.reset()
        store = bucket_store(s3.url, tmp_path / f"mirror-{number}")
        old, new = two_runs(store)
        command = [sys.executable, "-c", CHILD, s3.proxy.url, str(store.root)]
        child = subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(random.Random(number).uniform(0, 1.5))
        child.send_signal(signal.SIGKILL)
        child.wait()
        s3.proxy.settle()
        check_whole(store, old, new)
        gc(store)
        gc(store, NOTHING, purge_after_days=0, now=LATER)
        assert set(store.refs()) == new.refs
        assert not any(key.startswith("store/trash/") for key in list(s3.keys()))
        assert objects_of(s3, old.capture) == []


def check_whole(store: RemoteStore, old: Chain, new: Chain) -> None:
    """What stays is intact, what is seen is whole, and what can be restored too."""
    seen = set(store.refs())
    assert new.refs <= seen
    for ref in seen:
        assert not store.problems(store.read(ref))
    for entry in store.trash().entries():
        manifest: Manifest = store.trash().manifest(entry)
        assert entry.ref in old.refs
        assert not store.problems(manifest)
