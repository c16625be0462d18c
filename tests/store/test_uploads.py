"""Uploads against a real S3 server whose connection is cut, slowed down and answered with errors."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle3_core.artifacts import FileEntry
from eagle3_core.config import ObjectRoot
from eagle3_core.errors import LostObjectError, ObjectAccessError, ObjectStoreError, StoreError
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store import object_wire, objects, uploads
from eagle3_core.store.files import file_entry
from eagle3_core.store.objects import ObjectClient
from eagle3_core.store.uploads import object_problem, plan_parts, upload
from tests.doubles.s3 import (
    BUCKET,
    MIB,
    S3,
    Answer,
    Cut,
    Fault,
    Flip,
    Request,
    Slow,
    Swallow,
    first,
    refuse_checksums,
)
from tests.waiting import wait_for

KEY = "capture/shard.safetensors"
NUM_PARTS = 6


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (objects, uploads):
        monkeypatch.setattr(module, "backoff_seconds", lambda number: 0.01)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("local") / "shard.safetensors"
    path.write_bytes(os.urandom((NUM_PARTS - 1) * 5 * MIB + 4321))
    return path


@pytest.fixture(scope="module")
def entry(shard: Path) -> FileEntry:
    return file_entry(shard.parent, shard)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of two parts."""
    path = tmp_path_factory.mktemp("local") / "small.safetensors"
    path.write_bytes(os.urandom(5 * MIB + 4321))
    return path


@pytest.fixture(scope="module")
def small_entry(small: Path) -> FileEntry:
    return file_entry(small.parent, small)


def make_client(s3: S3, checksum: str = "sha256", **settings: object) -> ObjectClient:
    config = ObjectStoreConfig.model_validate(
        {"endpoint_url": s3.proxy.url, "checksum": checksum, "part_bytes": 5 * MIB, "attempts": 3} | settings
    )
    return ObjectClient(ObjectRoot(BUCKET, "store"), config)


def stored(s3: S3, key: str = KEY) -> bytes:
    return s3.client().get_object(Bucket=BUCKET, Key=f"store/{key}")["Body"].read()


def is_part(*numbers: int):
    return lambda request: request.part in numbers


def test_parts_cover_the_file_and_are_at_most_ten_thousand() -> None:
    assert [(p.number, p.start, p.length) for p in plan_parts(11, 5)] == [(1, 0, 5), (2, 5, 5), (3, 10, 1)]
    assert [(p.start, p.length) for p in plan_parts(0, 5)] == [(0, 0)]
    many = plan_parts(10**6, 7)
    assert len(many) <= 10_000
    assert sum(part.length for part in many) == 10**6


@pytest.mark.parametrize("checksum", ["sha256", "etag", "read_back"])
def test_dropped_connections_cost_only_their_part(
    s3: S3, shard: Path, entry: FileEntry, checksum: str
) -> None:
    """Parts 2 and 5 are cut after 1 MiB, and the completion's 200 carries an error at first."""
    s3.proxy.rules += [first(1, Cut(MIB), is_part(2)), first(2, Cut(MIB), is_part(5))]
    s3.proxy.rules.append(first(1, Answer(200, "InternalError"), lambda request: request.is_complete))

    proven = make_client(s3, checksum).run(upload(make_client(s3, checksum), shard, KEY, entry))

    assert s3.proxy.parts() == {1: 1, 2: 2, 3: 1, 4: 1, 5: 3, 6: 1}
    assert sum(request.is_complete for request in s3.proxy.seen) == 2
    assert hashlib.sha256(stored(s3)).digest() == hashlib.sha256(shard.read_bytes()).digest()
    facts = make_client(s3, checksum).head(KEY)
    assert facts is not None
    assert facts.size == entry.bytes
    assert object_problem(KEY, proven, facts) is None
    assert s3.open_uploads() == []


def test_a_completion_that_fails_under_status_200_is_tried_again(
    s3: S3, small: Path, small_entry: FileEntry
) -> None:
    s3.proxy.rules.append(first(1, Answer(200, "InternalError"), lambda request: request.is_complete))
    client = make_client(s3)
    client.run(upload(client, small, KEY, small_entry))
    assert stored(s3) == small.read_bytes()
    assert sum(request.is_complete for request in s3.proxy.seen) == 2
    assert s3.proxy.parts() == {1: 1, 2: 1}


def test_a_completion_that_always_fails_under_status_200_is_never_taken_for_done(
    s3: S3, small: Path, small_entry: FileEntry
) -> None:
    s3.proxy.rules.append(lambda request: Answer(200, "InternalError") if request.is_complete else None)
    client = make_client(s3)
    with pytest.raises(
        ObjectStoreError, match=r"complete_multipart_upload of s3://.* failed .*InternalError"
    ):
        client.run(upload(client, small, KEY, small_entry))
    assert s3.keys() == {}
    assert s3.open_uploads() == []


def test_a_lost_answer_of_the_completion_is_found_to_be_done(
    s3: S3, small: Path, small_entry: FileEntry
) -> None:
    s3.proxy.rules.append(first(1, Swallow(), lambda request: request.is_complete))
    client = make_client(s3)
    proven = client.run(upload(client, small, KEY, small_entry))
    assert object_problem(KEY, proven, client.head(KEY)) is None
    assert stored(s3) == small.read_bytes()


def test_a_part_that_never_arrives_ends_in_one_line_and_leaves_nothing(
    s3: S3, small: Path, small_entry: FileEntry
) -> None:
    s3.proxy.rules.append(lambda request: Cut(MIB) if request.part == 1 else None)
    client = make_client(s3)
    with pytest.raises(
        ObjectStoreError, match=r"upload_part of s3://.*/shard.safetensors failed .*3 attempts"
    ):
        client.run(upload(client, small, KEY, small_entry))
    assert s3.keys() == {}
    assert s3.open_uploads() == []
    assert s3.proxy.parts()[1] >= 3  # aiohttp sends a request of its own accord once more


def test_a_lost_answer_to_the_begin_of_an_upload_leaves_no_orphan(
    s3: S3, small: Path, small_entry: FileEntry
) -> None:
    begins = lambda request: request.method == "POST" and "uploads" in request.query  # noqa: E731
    s3.proxy.rules.append(first(1, Swallow(), begins))
    client = make_client(s3)
    client.run(upload(client, small, KEY, small_entry))
    assert stored(s3) == small.read_bytes()
    assert s3.open_uploads() == []


@pytest.mark.parametrize(
    "fault", [Answer(503, "SlowDown"), Answer(500, "InternalError"), Answer(400, "BadDigest")]
)
def test_errors_that_pass_are_retried_by_part(
    s3: S3, small: Path, small_entry: FileEntry, fault: Fault
) -> None:
    s3.proxy.rules.append(first(2, fault, is_part(1)))
    client = make_client(s3)
    client.run(upload(client, small, KEY, small_entry))
    assert s3.proxy.parts() == {1: 3, 2: 1}
    assert stored(s3) == small.read_bytes()


@pytest.mark.parametrize("checksum", ["etag", "read_back"])
def test_a_server_that_refuses_checksum_headers_works_with_the_setting(
    s3: S3, small: Path, small_entry: FileEntry, checksum: str
) -> None:
    s3.proxy.rules.append(refuse_checksums)
    client = make_client(s3, checksum)
    proven = client.run(upload(client, small, KEY, small_entry))
    assert stored(s3) == small.read_bytes()
    assert object_problem(KEY, proven, client.head(KEY)) is None
    assert client.put_bytes("manifest.json", b"{}")
    client.delete([KEY, "manifest.json"])
    assert s3.keys() == {}


def test_the_error_of_a_server_that_refuses_checksums_names_the_setting(
    s3: S3, small: Path, small_entry: FileEntry
) -> None:
    s3.proxy.rules.append(refuse_checksums)
    client = make_client(s3)
    with pytest.raises(
        ObjectAccessError, match=r"refuses the checksum.*set object_store\.checksum to `etag`"
    ):
        client.run(upload(client, small, KEY, small_entry))
    assert s3.open_uploads() == []


@pytest.mark.parametrize("checksum", ["sha256", "etag", "read_back"])
def test_an_object_that_the_server_stored_wrongly_is_found_and_removed(
    s3: S3, small: Path, small_entry: FileEntry, checksum: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(s3, checksum)
    complete = uploads._complete

    async def then_damage(*arguments: object) -> None:
        await complete(*arguments)  # type: ignore[arg-type]
        damaged = {"Body": b"\0" * small_entry.bytes, "ChecksumAlgorithm": "SHA256"}
        await asyncio.to_thread(s3.client().put_object, Bucket=BUCKET, Key=f"store/{KEY}", **damaged)

    monkeypatch.setattr(uploads, "_complete", then_damage)
    with pytest.raises(LostObjectError, match="after its upload"):
        client.run(upload(client, small, KEY, small_entry))
    assert s3.keys() == {}


@pytest.mark.parametrize("checksum", ["sha256", "etag"])
def test_a_part_that_is_damaged_on_its_way_is_sent_again(
    s3: S3, small: Path, small_entry: FileEntry, checksum: str
) -> None:
    s3.proxy.rules.append(first(1, Flip(), is_part(2)))
    client = make_client(s3, checksum)
    client.run(upload(client, small, KEY, small_entry))
    assert stored(s3) == small.read_bytes()
    assert s3.proxy.parts() == {1: 1, 2: 2}


def test_without_checksums_damage_on_the_way_is_found_by_reading_back_and_mended(
    s3: S3, small: Path, small_entry: FileEntry
) -> None:
    s3.proxy.rules.append(first(1, Flip(), is_part(2)))
    client = make_client(s3, "read_back")
    client.run(upload(client, small, KEY, small_entry))
    assert stored(s3) == small.read_bytes()
    assert s3.proxy.parts() == {1: 2, 2: 2}


def test_a_local_file_that_changed_since_it_was_hashed_is_not_uploaded(s3: S3, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"good")
    entry = file_entry(tmp_path, path)
    path.write_bytes(b"evil")
    client = make_client(s3)
    with pytest.raises(StoreError, match="does not match its hash and is not uploaded"):
        client.run(upload(client, path, KEY, entry))
    assert s3.keys() == {}


def test_what_is_there_already_is_not_sent_again(s3: S3, small: Path, small_entry: FileEntry) -> None:
    client = make_client(s3)
    once = client.run(upload(client, small, KEY, small_entry))
    again = client.run(upload(client, small, KEY, small_entry))
    assert again == once
    assert s3.proxy.parts() == {1: 1, 2: 1}


def test_another_content_under_the_same_key_is_replaced(s3: S3, tmp_path: Path) -> None:
    client = make_client(s3)
    for content in (b"first", b"other"):
        path = tmp_path / "file"
        path.write_bytes(content)
        client.run(upload(client, path, KEY, file_entry(tmp_path, path)))
        assert stored(s3) == content


def test_the_upload_of_a_file_whose_name_begins_alike_is_let_alone(
    s3: S3, small: Path, small_entry: FileEntry
) -> None:
    s3.client().create_multipart_upload(Bucket=BUCKET, Key=f"store/{KEY}.index")
    client = make_client(s3)
    client.run(upload(client, small, KEY, small_entry))
    assert s3.open_uploads() == [f"store/{KEY}.index"]


def test_an_interrupted_upload_is_aborted(s3: S3, small: Path, small_entry: FileEntry) -> None:
    s3.proxy.rules.append(lambda request: Slow(MIB) if request.part else None)
    client = make_client(s3)
    call = client.start(upload(client, small, KEY, small_entry))
    wait_for(lambda: {1, 2} <= s3.proxy.parts().keys())
    call.cancel()
    call.wait()
    assert s3.open_uploads() == []
    assert s3.keys() == {}


def test_ctrl_c_during_an_upload_leaves_no_parts(s3: S3, small: Path) -> None:
    s3.proxy.rules.append(lambda request: Slow(MIB) if request.part == 1 else None)
    code = f"""
import sys
from pathlib import Path
from eagle3_core.config import ObjectRoot
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store.files import file_entry
from eagle3_core.store.objects import ObjectClient
from eagle3_core.store.uploads import upload
settings = ObjectStoreConfig(endpoint_url={s3.proxy.url!r}, part_bytes={5 * MIB})
client = ObjectClient(ObjectRoot({BUCKET!r}, "store"), settings)
path = Path({str(small)!r})
client.run(upload(client, path, "x", file_entry(path.parent, path)))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    wait_for(lambda: 1 in s3.proxy.parts())
    process.send_signal(2)
    assert process.wait(120) != 0
    assert s3.open_uploads() == []
    assert s3.keys() == {}


def test_a_slow_server_is_given_up_only_when_it_stands_still(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_wire, "SLOWEST_BYTES_PER_SECOND", MIB / 60)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(MIB))
    s3.proxy.rules.append(lambda request: Slow(MIB / 5) if request.method == "PUT" else None)
    client = make_client(s3, timeout_seconds=4.0)
    client.run(upload(client, path, KEY, file_entry(tmp_path, path)))
    assert stored(s3) == path.read_bytes()
    assert sum(request.method == "PUT" for request in s3.proxy.seen) == 1


def test_parts_go_side_by_side(s3: S3, shard: Path, entry: FileEntry) -> None:
    at_once, most, lock, are_three = 0, 0, threading.Lock(), threading.Event()

    def count(request: Request) -> Fault | None:
        nonlocal at_once, most
        if request.part is not None:
            with lock:
                at_once += 1
                most = max(most, at_once)
                if at_once == 3:
                    are_three.set()
            are_three.wait(120)
            time.sleep(0.2)
            with lock:
                at_once -= 1
        return None

    s3.proxy.rules.append(count)
    client = make_client(s3, max_connections=3)
    client.run(upload(client, shard, KEY, entry))
    assert most == 3
