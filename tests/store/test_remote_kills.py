"""Kills and interruptions of who writes artifacts into a bucket."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle3_core.store.calls import Call
from eagle3_core.store.files import hash_file
from eagle3_core.store.remote import RemoteStore
from tests.doubles.s3 import BUCKET, MIB, S3, Slow
from tests.kills import num_kills
from tests.store.test_remote import PLAN, PREFIX, make_store, shard
from tests.waiting import wait_for

KILLS = num_kills() // 4

WORKER = """
import sys
from pathlib import Path
from tests.store import test_remote_kills as tests
from tests.doubles.s3 import S3, Proxy

class At:
    url = sys.argv[1]

s3 = S3(sys.argv[1], At())
store = tests.make_store(s3, Path(sys.argv[2]))
tests.write_all(store)
"""
BIG = 6 * MIB
COUNT = 3


def write_all(store: RemoteStore) -> dict[str, str]:
    with store.writer(PLAN, wait_seconds=30.0) as writer:
        for number in range(COUNT):
            if f"shard-{number}.safetensors" not in writer.files:
                writer.record(shard(writer.folder, number, BIG))
        manifest = writer.complete()
    return {entry.path: entry.xxh3_128 for entry in manifest.files}


def test_kill_9_at_any_moment_of_uploading_loses_nothing_and_shows_nothing_half_made(
    s3: S3, tmp_path: Path
) -> None:
    wanted = {}
    for number in range(COUNT):
        entry = shard(tmp_path, number, BIG)
        wanted[entry.path] = entry.xxh3_128
    moments, killed = random.Random(0), 0
    for round_number in range(KILLS):
        mirror = tmp_path / f"mirror-{round_number}"
        s3.proxy.rules.append(lambda request: Slow(4 * MIB) if request.part else None)
        process = subprocess.Popen([sys.executable, "-c", WORKER, s3.proxy.url, str(mirror)])
        wait_for(lambda: any(r.part for r in s3.proxy.seen))
        time.sleep(moments.uniform(0.0, 1.4))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        s3.proxy.rules.clear()
        s3.proxy.settle()
        check_after_kill(s3, make_store(s3, tmp_path / "looker"), tmp_path)

        assert write_all(make_store(s3, mirror)) == wanted
        assert s3.open_uploads() == []
        assert sorted(s3.keys()) == [
            f"{PREFIX}/manifest.json",
            *(f"{PREFIX}/{name}" for name in sorted(wanted)),
        ]
        for key in s3.keys():  # noqa: SIM118
            s3.client().delete_object(Bucket=BUCKET, Key=key)
        s3.proxy.seen.clear()
    assert killed


def check_after_kill(s3: S3, store: RemoteStore, originals: Path) -> None:
    """What a manifest names is whole in the bucket, and no shard is there but a whole one."""
    found = store.find(PLAN.ref)
    for entry in found.files if found else ():
        with store.shard_file(found, entry.path) as path:  # type: ignore[arg-type]
            assert hash_file(path) == hash_file(originals / entry.path)
    for key, size in s3.keys(PREFIX).items():
        assert size == BIG or not key.endswith(".safetensors")


def test_uploads_that_a_killed_process_left_open_are_aborted_by_the_next_writer(
    s3: S3, tmp_path: Path
) -> None:
    for name in ("shard-0.safetensors", "shard-9.safetensors"):
        s3.client().create_multipart_upload(Bucket=BUCKET, Key=f"{PREFIX}/{name}")
    elsewhere = s3.client().create_multipart_upload(Bucket=BUCKET, Key="store/capture/other/x")
    assert elsewhere["UploadId"]
    with make_store(s3, tmp_path).writer(PLAN):
        assert s3.open_uploads() == ["store/capture/other/x"]


def test_an_interrupted_writer_leaves_no_parts(s3: S3, tmp_path: Path) -> None:
    """While it waits for uploads, of which none ends for long."""
    s3.proxy.rules.append(lambda request: Slow(MIB / 16) if request.part else None)
    store = make_store(s3, tmp_path)

    def interrupt() -> None:
        wait_for(lambda: s3.proxy.parts() == {1: COUNT, 2: COUNT})
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        write_all(store)
    interrupting.join()
    assert s3.open_uploads() == []
    assert [*s3.keys()] == [f"{PREFIX}/manifest.json"]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_writer_that_is_interrupted_while_it_begins_an_upload_leaves_no_parts(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    s3.proxy.rules.append(lambda request: Slow(MIB / 16) if request.part else None)
    begin = Call.begin

    def begin_and_be_interrupted(call: Call[object]) -> None:
        is_upload = call._coroutine.__name__ == "upload"
        if has_begun or not is_upload:
            begin(call)
        if is_upload:
            if has_begun:
                wait_for(lambda: s3.proxy.parts() == {1: 1, 2: 1})
            raise KeyboardInterrupt

    monkeypatch.setattr(Call, "begin", begin_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_all(make_store(s3, tmp_path))
    assert s3.open_uploads() == []
    assert [*s3.keys()] == [f"{PREFIX}/manifest.json"]
