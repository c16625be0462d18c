"""One writer an artifact among hosts: a lease object in the bucket."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from eagle3_core.config import ObjectRoot
from eagle3_core.errors import FolderInUseError
from eagle3_core.host.process_tree import ProcessId, boot_id
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store import lease as leases
from eagle3_core.store.lease import hold_lease
from eagle3_core.store.objects import ObjectClient
from tests.doubles.s3 import BUCKET, S3, Without
from tests.waiting import wait_for

FOLDER = "capture/0123456789abcdef"
KEY = f"{FOLDER}/.lease"
OTHER_HOST = {"process": "12:34:there", "boot": "another", "host": "gpu-7", "run": "run-1", "token": "theirs"}


@pytest.fixture
def client(s3: S3) -> ObjectClient:
    settings = ObjectStoreConfig(endpoint_url=s3.url)
    return ObjectClient(ObjectRoot(BUCKET, "store"), settings)


def test_a_lease_is_there_while_it_is_held_and_gone_after(client: ObjectClient) -> None:
    with hold_lease(client, FOLDER, 0.0, "run-2") as lease:
        lease.check()
        assert json.loads(client.get_bytes(KEY)[0])["run"] == "run-2"  # type: ignore[index]
    assert client.list("") == {}


def test_a_living_holder_on_another_host_is_named(client: ObjectClient) -> None:
    client.put_bytes(KEY, json.dumps(OTHER_HOST).encode())
    with (
        pytest.raises(
            FolderInUseError, match=r"in use by another process \(process 12 on gpu-7, run run-1\)"
        ),
        hold_lease(client, FOLDER, 0.0),
    ):
        pass
    assert json.loads(client.get_bytes(KEY)[0]) == OTHER_HOST  # type: ignore[index]


def test_two_writers_on_one_host_exclude_each_other(client: ObjectClient) -> None:
    with hold_lease(client, FOLDER, 0.0), pytest.raises(FolderInUseError), hold_lease(client, FOLDER, 0.0):
        pass


def test_a_host_that_shows_no_life_is_followed(client: ObjectClient) -> None:
    client.put_bytes(KEY, json.dumps(OTHER_HOST).encode())
    time.sleep(1.2)
    with hold_lease(client, FOLDER, 120.0, stale_seconds=1.0) as lease:
        lease.check()


def test_a_dead_process_of_this_host_is_followed_at_once(client: ObjectClient) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead = ProcessId.current().model_copy(update={"pid": process.pid, "start_ticks": 1})
    client.put_bytes(KEY, json.dumps(OTHER_HOST | {"process": str(dead), "boot": boot_id()}).encode())
    with hold_lease(client, FOLDER, 0.0):
        pass


def test_a_holder_is_alive_as_long_as_it_renews(
    client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.1)
    with hold_lease(client, FOLDER, 0.0) as lease:
        before = client.head(KEY)
        assert before is not None
        wait_for(lambda: (after := client.head(KEY)) is not None and after.etag != before.etag)
        lease.check()


def test_who_was_cut_off_and_followed_notices_before_it_writes(
    client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.1)
    with hold_lease(client, FOLDER, 0.0) as lease:
        with lease._putting:  # moto looks at a condition and puts in two steps
            client.put_bytes(KEY, json.dumps(OTHER_HOST).encode())
        wait_for(lambda: lease._taken_by is not None)
        with pytest.raises(
            FolderInUseError, match=r"was taken over by another process \(process 12 on gpu-7"
        ):
            lease.check()
    assert json.loads(client.get_bytes(KEY)[0]) == OTHER_HOST  # type: ignore[index]


def test_without_conditions_who_stood_still_does_not_take_the_lease_back(
    s3: S3, client: ObjectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 60.0)
    s3.proxy.rules.append(lambda request: Without(("if-match", "if-none-match")))
    plain = ObjectClient(client.root, ObjectStoreConfig(endpoint_url=s3.proxy.url))
    with hold_lease(plain, FOLDER, 0.0, stale_seconds=300.0) as lease:
        plain.put_bytes(KEY, json.dumps(OTHER_HOST).encode())
        monkeypatch.setattr(leases, "_now", lambda: time.clock_gettime(time.CLOCK_BOOTTIME) + 200.0)
        with pytest.raises(FolderInUseError, match="was taken over by another process"):
            lease.check()
    assert json.loads(client.get_bytes(KEY)[0]) == OTHER_HOST  # type: ignore[index]


def test_of_two_hosts_that_find_a_stale_lease_one_gets_it(client: ObjectClient) -> None:
    client.put_bytes(KEY, json.dumps(OTHER_HOST).encode())
    found = client.get_bytes(KEY)
    assert found is not None
    assert client.put_bytes(KEY, b"first", replaces=found[1].etag)
    assert client.put_bytes(KEY, b"second", replaces=found[1].etag) is None
