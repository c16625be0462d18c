"""Artifacts in a bucket: what is seen when, what a resume takes, and what a kill leaves."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from pathlib import Path

import pytest

from eagle3_core.artifacts import ArtifactPlan, FileEntry, Manifest
from eagle3_core.config import ObjectRoot
from eagle3_core.errors import (
    FolderInUseError,
    LostObjectError,
    ObjectAccessError,
    ObjectStoreError,
    StoreError,
)
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store import lease as leases
from eagle3_core.store import object_wire, objects, uploads
from eagle3_core.store.condemned import condemn
from eagle3_core.store.files import file_entry
from eagle3_core.store.progress import Progress
from eagle3_core.store.remote import RemoteStore
from tests.doubles.s3 import BUCKET, MIB, S3, Answer, Cut, Request, Slow, first
from tests.waiting import wait_for

PLAN = ArtifactPlan(kind="capture", identity={"states": 1})
SMALL = ArtifactPlan(kind="checkpoint", identity={"weights": 1})
PREFIX = f"store/{PLAN.ref}"


class StopError(Exception):
    """What ends a writer early."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (object_wire, objects, uploads):
        monkeypatch.setattr(module, "backoff_seconds", lambda number: 0.01)


def make_store(s3: S3, mirror: Path, **settings: object) -> RemoteStore:
    document = {
        "endpoint_url": s3.proxy.url,
        "part_bytes": 5 * MIB,
        "attempts": 3,
        "outage_minutes": 0,
    } | settings
    return RemoteStore(ObjectRoot(BUCKET, "store"), mirror, ObjectStoreConfig.model_validate(document))


def shard(writer_folder: Path, number: int, size: int = 1000) -> FileEntry:
    path = writer_folder / f"shard-{number}.safetensors"
    path.write_bytes(random.Random(number).randbytes(size))
    return file_entry(writer_folder, path, num_samples=number)


def make(store: RemoteStore, count: int = 3) -> Manifest:
    with store.writer(PLAN, "run-1") as writer:
        for number in range(count):
            if f"shard-{number}.safetensors" not in writer.files:
                writer.record(shard(writer.folder, number), 1.0)
        return writer.complete(result={"n": count})


def named(store: RemoteStore) -> list[str]:
    """The files that the bucket's manifest, which is still partial, names."""
    found = store.find(PLAN.ref)
    assert found is not None
    assert found.state == "partial"
    return [entry.path for entry in found.files]


def is_shard(request: Request) -> bool:
    return request.method == "PUT" and "shard-" in request.target


def is_read(request: Request) -> bool:
    return request.method == "GET" and "shard-" in request.target


def is_manifest(request: Request) -> bool:
    return request.method == "PUT" and request.target.split("?")[0].endswith("/manifest.json")


def test_a_complete_artifact_is_in_the_bucket_and_its_shards_have_left_this_host(
    s3: S3, tmp_path: Path
) -> None:
    store = make_store(s3, tmp_path)
    manifest = make(store)
    names = ["manifest.json", *(f"shard-{number}.safetensors" for number in range(3))]
    assert sorted(s3.keys()) == [f"{PREFIX}/{name}" for name in names]
    assert [path.name for path in store.folder(PLAN.ref).iterdir()] == ["manifest.json"]
    elsewhere = make_store(s3, tmp_path / "elsewhere")
    assert elsewhere.read(PLAN.ref) == manifest
    assert elsewhere.list() == [manifest]
    assert elsewhere.refs() == (PLAN.ref,)
    assert elsewhere.is_intact(PLAN.ref)
    assert (
        elsewhere.read_range(PLAN.ref, "shard-2.safetensors", 5, 9) == random.Random(2).randbytes(1000)[5:14]
    )
    assert not (tmp_path / "elsewhere").exists()
    assert all(entry.facts["num_samples"] == number for number, entry in enumerate(manifest.files))


def test_manifests_are_put_after_the_files_they_name(s3: S3, tmp_path: Path) -> None:
    make(make_store(s3, tmp_path))
    order = [
        "manifest" if is_manifest(r) else "shard" for r in s3.proxy.seen if is_manifest(r) or is_shard(r)
    ]
    assert order[:2] == ["manifest", "shard"]  # the first names nothing yet
    assert order[-1] == "manifest"
    assert order.count("shard") == 3


def test_a_local_shard_stays_until_the_bucket_has_it_proven_and_named(s3: S3, tmp_path: Path) -> None:
    uploading, may_upload, naming, may_name = (threading.Event() for _ in range(4))

    def hold_up(request: Request) -> None:
        if is_shard(request):
            uploading.set()
            may_upload.wait(120)
        if is_manifest(request) and may_upload.is_set():
            naming.set()
            may_name.wait(120)

    s3.proxy.rules.append(hold_up)
    store = make_store(s3, tmp_path, timeout_seconds=300)
    with store.writer(PLAN) as writer:
        writer.record(shard(writer.folder, 0, 20_000))
        local = writer.folder / "shard-0.safetensors"
        assert uploading.wait(120)
        assert local.exists()
        assert named(store) == []
        may_upload.set()
        assert naming.wait(120)
        found = local.exists(), f"{PREFIX}/shard-0.safetensors" in s3.keys(), named(store)  # noqa: SIM118
        may_name.set()
        assert found == (True, True, [])
        writer.drain()
        assert not local.exists()
        assert named(store) == ["shard-0.safetensors"]


def test_a_local_shard_that_a_kill_left_behind_goes_with_the_next_writer(s3: S3, tmp_path: Path) -> None:
    store = make_store(s3, tmp_path)
    make(store, 1)
    shard(store.folder(PLAN.ref), 0)
    with store.writer(PLAN) as writer:
        assert writer.is_complete
    assert [path.name for path in store.folder(PLAN.ref).iterdir()] == ["manifest.json"]


def test_an_upload_that_fails_surfaces_and_the_shard_is_kept_for_the_next_run(s3: S3, tmp_path: Path) -> None:
    store = make_store(s3, tmp_path)
    s3.proxy.rules.append(lambda request: Cut(0) if is_shard(request) else None)
    with pytest.raises(ObjectStoreError, match=r"put_object of s3://.*shard-0.safetensors failed"):
        make(store, 1)
    assert named(store) == []
    assert [*s3.keys()] == [f"{PREFIX}/manifest.json"]
    assert (store.folder(PLAN.ref) / "shard-0.safetensors").exists()

    s3.proxy.rules.clear()
    with store.writer(PLAN) as writer:
        assert list(writer.files) == ["shard-0.safetensors"]
        writer.complete()
    assert make_store(s3, tmp_path / "elsewhere").is_intact(PLAN.ref)


def test_an_outage_is_waited_for(s3: S3, tmp_path: Path) -> None:
    store = make_store(s3, tmp_path, outage_minutes=5)
    s3.proxy.rules.append(first(20, Answer(503, "SlowDown"), is_shard))
    assert make(store, 1).files
    s3.proxy.rules.append(first(20, Cut(0, in_answer=True), is_read))
    assert store.read_range(PLAN.ref, "shard-0.safetensors", 0, 10) == random.Random(0).randbytes(1000)[:10]


def test_who_writes_faster_than_the_network_waits(s3: S3, tmp_path: Path) -> None:
    s3.proxy.rules.append(lambda request: Slow(100_000) if is_shard(request) else None)
    store = make_store(s3, tmp_path, upload_backlog_bytes=25_000)
    with store.writer(PLAN) as writer:
        for number in range(6):
            writer.record(shard(writer.folder, number, 10_000))
            assert writer.waiting_bytes <= 25_000
        writer.complete()
    assert len(store.read(PLAN.ref).files) == 6


def test_a_lost_or_replaced_shard_is_found_without_a_download_and_made_anew(
    s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(s3, tmp_path)
    manifest = make(store)
    s3.client().delete_object(Bucket=BUCKET, Key=f"{PREFIX}/shard-0.safetensors")
    s3.client().put_object(Bucket=BUCKET, Key=f"{PREFIX}/shard-1.safetensors", Body=b"\0" * 1000)
    s3.proxy.seen.clear()
    problems = store.problems(manifest)
    assert problems.keys() == {"shard-0.safetensors", "shard-1.safetensors"}
    assert problems["shard-0.safetensors"].endswith("shard-0.safetensors is not in the bucket")
    assert "another ETag" in problems["shard-1.safetensors"]
    assert not [r for r in s3.proxy.seen if r.method == "GET" and "shard" in r.target]
    with pytest.raises(LostObjectError, match=r"shard-0.safetensors is not in the bucket; run the stage"):
        store.read_range(PLAN.ref, "shard-0.safetensors", 0, 3)

    s3.proxy.seen.clear()
    again = make(store)
    assert again.content == manifest.content
    told = [one.getMessage() for one in caplog.records if one.name == "eagle3_core.store.local"]
    assert told == [f"{problem}: made again" for problem in problems.values()]
    assert sorted(r.target.rpartition("/")[2].split("?")[0] for r in s3.proxy.seen if is_shard(r)) == [
        "shard-0.safetensors",
        "shard-1.safetensors",
    ]
    assert store.is_intact(PLAN.ref)


def test_a_condemned_shard_is_made_anew(s3: S3, tmp_path: Path) -> None:
    store = make_store(s3, tmp_path)
    manifest = make(store)
    condemn(store, manifest, {"shard-1.safetensors": "states of another layer"})
    assert store.problems(manifest).keys() == {"shard-1.safetensors"}
    with store.writer(PLAN) as writer:
        assert sorted(writer.files) == ["shard-0.safetensors", "shard-2.safetensors"]


def test_single_shards_and_small_artifacts_are_fetched_and_checked(s3: S3, tmp_path: Path) -> None:
    store = make_store(s3, tmp_path / "one")
    manifest = make(store)
    with store.shard_file(manifest, "shard-1.safetensors") as path:
        assert path.read_bytes() == random.Random(1).randbytes(1000)
    assert not path.exists()
    with store.writer(SMALL) as writer:
        (writer.folder / "model").write_bytes(b"weights")
        writer.complete([writer.folder / "model"])

    other = make_store(s3, tmp_path / "other")
    folder = other.fetch(SMALL.ref)
    assert (folder / "model").read_bytes() == b"weights"
    (folder / "model").write_bytes(b"damaged")
    assert (other.fetch(SMALL.ref) / "model").read_bytes() == b"weights"
    s3.proxy.seen.clear()
    other.fetch(SMALL.ref)
    assert not [r for r in s3.proxy.seen if r.target.endswith("/model")]

    s3.client().put_object(Bucket=BUCKET, Key=f"{PREFIX}/shard-1.safetensors", Body=b"\0" * 1000)
    with (
        pytest.raises(LostObjectError, match="does not match its hash"),
        store.shard_file(manifest, "shard-1.safetensors"),
    ):
        pass


def test_two_hosts_cannot_write_one_artifact(s3: S3, tmp_path: Path) -> None:
    one, other = make_store(s3, tmp_path / "one"), make_store(s3, tmp_path / "other")
    with (
        one.writer(PLAN, "run-1"),
        pytest.raises(FolderInUseError, match=r"is in use by another process .*run run-1"),
        other.writer(PLAN, wait_seconds=0.0),
    ):
        pass


def test_an_artifact_of_another_identity_is_refused(s3: S3, tmp_path: Path) -> None:
    store = make_store(s3, tmp_path)
    manifest = make(store, 1)
    other = manifest.model_copy(update={"identity": {"states": 2}})
    store.client.put_bytes(f"{PLAN.ref}/manifest.json", other.model_dump_json().encode())
    with pytest.raises(StoreError, match="holds another artifact: states: 1 != 2"), store.writer(PLAN):
        pass


def test_another_host_goes_on_where_this_one_stopped(s3: S3, tmp_path: Path) -> None:
    here, there = make_store(s3, tmp_path / "here"), make_store(s3, tmp_path / "there")
    with contextlib.suppress(StopError), here.writer(SMALL) as writer:
        for step in (1, 2):
            (writer.folder / f"resume-{step}.pt").write_bytes(b"%d" % step * 50)
            (writer.folder / "resume.json").write_text(f"step {step}")
            with (writer.folder / "metrics.jsonl").open("a") as handle:
                handle.write(f"{step}\n")
            writer.save_progress(step, [f"resume-{step}.pt", "resume.json"], ["metrics.jsonl"])
            (writer.folder / f"resume-{step}.pt").unlink()  # the writer may remove it at once
            wait_for(lambda: not writer.progress.is_saving)
        raise StopError
    names = {key.rpartition("/")[2] for key in s3.keys()}  # noqa: SIM118
    assert names == {"manifest.json", ".progress.json", "metrics.jsonl", "resume-2.pt", "resume.json"}
    with there.writer(SMALL) as writer:
        assert (writer.folder / "resume-2.pt").read_bytes() == b"2" * 50
        assert (writer.folder / "resume.json").read_text() == "step 2"
        assert (writer.folder / "metrics.jsonl").read_text() == "1\n2\n"
        (writer.folder / "model").write_bytes(b"weights")
        writer.complete([writer.folder / "model"])
    assert {key.rpartition("/")[2] for key in s3.keys()} == {"manifest.json", "model"}  # noqa: SIM118


def test_a_save_that_is_cut_off_leaves_the_one_before_whole(s3: S3, tmp_path: Path) -> None:
    here, there = make_store(s3, tmp_path / "here"), make_store(s3, tmp_path / "there")
    broken = Answer(500, "InternalError")
    with contextlib.suppress(StopError), here.writer(SMALL) as writer:
        for step in (1, 2):
            if step == 2:  # its last file never arrives
                s3.proxy.rules.append(lambda r: broken if r.target.endswith("/resume.json") else None)
            (writer.folder / "metrics.jsonl").write_text(f"step {step}")
            (writer.folder / "resume.json").unlink(missing_ok=True)
            (writer.folder / "resume.json").write_text(f"step {step}")
            writer.save_progress(step, ["resume.json"], ["metrics.jsonl"])
            wait_for(lambda: not writer.progress.is_saving)
        raise StopError
    s3.proxy.rules.clear()
    with there.writer(SMALL) as writer:
        assert (writer.folder / "metrics.jsonl").read_text() == "step 1"
        assert (writer.folder / "resume.json").read_text() == "step 1"


def test_what_lies_here_is_not_replaced_by_an_older_save(s3: S3, tmp_path: Path) -> None:
    store = make_store(s3, tmp_path)
    with contextlib.suppress(StopError), store.writer(SMALL) as writer:
        (writer.folder / "resume.json").write_text("step 1")
        writer.save_progress(1, ["resume.json"])
        wait_for(lambda: not writer.progress.is_saving)
        s3.proxy.rules.append(lambda r: Answer(500, "InternalError") if r.method == "PUT" else None)
        (writer.folder / "resume.json").unlink()
        (writer.folder / "resume.json").write_text("step 2")
        writer.save_progress(2, ["resume.json"])
        raise StopError
    s3.proxy.rules.clear()
    with store.writer(SMALL) as writer:
        assert (writer.folder / "resume.json").read_text() == "step 2"


def test_who_was_followed_leaves_the_progress_of_the_new_owner_alone(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host stands still for long; another one takes the artifact over and gets further."""
    here, there = make_store(s3, tmp_path / "here"), make_store(s3, tmp_path / "there")

    def save(progress: Progress, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"resume-{step}.pt").write_bytes(b"%d" % step * 50)
        progress.save(step, [f"resume-{step}.pt"], [])
        wait_for(lambda: not progress.is_saving)

    with contextlib.suppress(StopError), here.writer(SMALL) as writer:
        save(writer.progress, writer.folder, 1)
        owner = {"process": "12:34:there", "boot": "another", "host": "gpu-7", "token": "theirs"}
        there.client.put_bytes(f"{SMALL.ref}/.lease", json.dumps(owner).encode())
        newer = Progress(there.client, there.folder(SMALL.ref), str(SMALL.ref), lambda: None)
        save(newer, there.folder(SMALL.ref), 7)
        keys = s3.keys()
        monkeypatch.setattr(leases, "_now", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + 200.0)
        save(writer.progress, writer.folder, 2)
        assert s3.keys() == keys
        with pytest.raises(FolderInUseError, match=r"taken over by another process \(process 12 on gpu-7"):
            writer.save_progress(3, ["resume-2.pt"])
        raise StopError
    saved = there.client.get_bytes(f"{SMALL.ref}/.progress.json")
    assert saved is not None
    assert json.loads(saved[0])["position"] == 7
    assert [path.name for path in here.folder(SMALL.ref).glob(".*progress-*")] == []


def test_the_store_is_written_before_anything_relies_on_it(s3: S3, tmp_path: Path) -> None:
    store = make_store(s3, tmp_path)
    assert store.check_writable().startswith(f"s3://{BUCKET}/store at {s3.proxy.url} can be written")
    assert s3.keys() == {}
    assert s3.open_uploads() == []


def test_a_bucket_that_may_only_be_read_is_found_by_writing(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.make_user("s3:Get*", "s3:List*").items():
        monkeypatch.setenv(name, value)
    s3.require_credentials(True)
    with pytest.raises(ObjectAccessError, match=r"put_object of s3://.* is not permitted"):
        make_store(s3, tmp_path).check_writable()
    s3.require_credentials(False)
