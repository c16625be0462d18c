"""The client of one bucket: byte ranges, whole files, conditions, and one clear line for every error."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from eagle3_core.config import ObjectRoot
from eagle3_core.errors import LostObjectError, ObjectAccessError, ObjectStoreError
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store import objects
from eagle3_core.store.files import TEMPORARY_PREFIX, file_entry
from eagle3_core.store.objects import ObjectClient
from tests.doubles.s3 import BUCKET, MIB, S3, Answer, Cut, Swallow, first

pytestmark = pytest.mark.both


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "backoff_seconds", lambda number: 0.01)


def make_client(s3: S3, bucket: str = BUCKET, **settings: object) -> ObjectClient:
    document = {"endpoint_url": s3.proxy.url, "attempts": 3} | settings
    return ObjectClient(ObjectRoot(bucket, "store"), ObjectStoreConfig.model_validate(document))


def put(s3: S3, key: str, content: bytes) -> None:
    s3.client().put_object(Bucket=BUCKET, Key=f"store/{key}", Body=content)


def is_get(request: object) -> bool:
    return request.method == "GET"  # type: ignore[attr-defined]


def test_a_range_is_read_again_when_its_connection_breaks(s3: S3) -> None:
    content = os.urandom(MIB)
    put(s3, "x", content)
    s3.proxy.rules += [
        first(2, Cut(300_000, in_answer=True), is_get),
        first(1, Answer(503, "SlowDown"), is_get),
    ]
    assert make_client(s3, attempts=5).read_range("x", 1000, 600_000) == content[1000:601_000]


def test_a_range_past_the_end_or_of_a_lost_object_says_so(s3: S3) -> None:
    put(s3, "x", b"12345")
    client = make_client(s3)
    with pytest.raises(LostObjectError, match=r"x gave 3 bytes from byte 2 on; expected 9"):
        client.read_range("x", 2, 9)
    with pytest.raises(LostObjectError, match="shorter than its manifest says"):
        client.read_range("x", 10, 2)
    with pytest.raises(LostObjectError, match=f"s3://{BUCKET}/store/gone is not in the bucket"):
        client.read_range("gone", 0, 2)


def test_a_file_is_fetched_in_ranges_and_appears_only_whole(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "READ_BLOCK_BYTES", 100_000)
    path = tmp_path / "local"
    path.write_bytes(os.urandom(MIB))
    entry = file_entry(tmp_path, path)
    put(s3, "x", path.read_bytes())
    s3.proxy.rules.append(first(3, Cut(50_000, in_answer=True), is_get))
    client = make_client(s3, attempts=5)

    client.get_file("x", tmp_path / "back", entry.bytes, entry.xxh3_128)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()

    put(s3, "x", os.urandom(MIB))
    with pytest.raises(LostObjectError, match="does not match its hash"):
        client.get_file("x", tmp_path / "bad", entry.bytes, entry.xxh3_128)
    put(s3, "x", b"short")
    with pytest.raises(LostObjectError, match="has 5 bytes; expected 1,048,576 bytes"):
        client.get_file("x", tmp_path / "bad", entry.bytes, entry.xxh3_128)
    assert not (tmp_path / "bad").exists()
    assert not list(tmp_path.glob(f"{TEMPORARY_PREFIX}*"))


def test_conditions_hold(s3: S3) -> None:
    client = make_client(s3)
    etag = client.put_bytes("x", b"1", only_new=True)
    assert etag
    assert client.put_bytes("x", b"2", only_new=True) is None
    assert client.put_bytes("x", b"2", replaces="0" * 32) is None
    assert client.put_bytes("x", b"2", replaces=etag)
    assert client.put_bytes("y", b"2", replaces=etag) is None


def test_a_server_without_conditions_puts_all_the_same(s3: S3) -> None:
    s3.proxy.rules.append(lambda r: Answer(501, "NotImplemented") if "if-none-match" in r.headers else None)
    assert make_client(s3).put_bytes("x", b"1", only_new=True)


def test_objects_below_the_prefix_are_listed_and_deleted(s3: S3) -> None:
    client = make_client(s3)
    for number in range(5):
        put(s3, f"a/{number}", b"x" * number)
    put(s3, "b", b"")
    s3.client().put_object(Bucket=BUCKET, Key="elsewhere", Body=b"")
    assert client.list("a/") == {f"a/{number}": number for number in range(5)}
    assert sorted(client.list("")) == [*(f"a/{number}" for number in range(5)), "b"]
    client.delete([*client.list("a/"), "never-there"])
    assert s3.keys() == {"elsewhere": 0, "store/b": 0}


def test_a_listing_goes_on_over_pages(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(s3)
    for number in range(5):
        put(s3, f"a/{number}", b"")
    page = client._page

    async def short_page(method: str, arguments: dict[str, object]) -> dict[str, object]:
        return await page(method, arguments | {"MaxKeys": 2})

    monkeypatch.setattr(client, "_page", short_page)
    assert sorted(client.list("a/")) == [f"a/{number}" for number in range(5)]


def test_a_forked_process_uses_a_client_of_its_own(s3: S3) -> None:
    put(s3, "x", b"12345")
    client = make_client(s3)
    assert client.read_range("x", 0, 2) == b"12"
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(client.read_range("x", 2, 2)))
    child.start()
    assert queue.get(timeout=120) == b"34"
    child.join(60)


def test_wrong_credentials_are_one_line(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.require_credentials(True)
    with pytest.raises(ObjectAccessError) as caught:
        make_client(s3).put_bytes("x", b"1")
    s3.require_credentials(False)
    assert "does not accept the credentials for s3://captured-states/store/x" in str(caught.value)
    assert "check AWS_ACCESS_KEY_ID" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len([r for r in s3.proxy.seen if r.method == "PUT"]) == 1  # not asked again


def test_no_credentials_are_one_line(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ObjectAccessError, match=r"there are no credentials for s3://.*set AWS_ACCESS_KEY_ID"):
        make_client(s3).get_bytes("x")


def test_a_profile_that_does_not_exist_is_one_line(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ObjectAccessError, match=r"no credentials.*nobody"):
        make_client(s3).get_bytes("x")


def test_a_missing_bucket_is_one_line(s3: S3) -> None:
    client = make_client(s3, bucket="another-bucket")
    for ask in (lambda: client.get_bytes("x"), lambda: client.put_bytes("x", b""), lambda: client.list("")):
        with pytest.raises(
            ObjectAccessError, match=r"the bucket of s3://another-bucket/store\S* does not exist"
        ):
            ask()


def test_a_bucket_that_may_only_be_read_is_one_line(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    put(s3, "x", b"12345")
    for name, value in s3.make_user("s3:Get*", "s3:List*").items():
        monkeypatch.setenv(name, value)
    s3.require_credentials(True)
    client = make_client(s3)
    found = client.read_range("x", 0, 5)
    with pytest.raises(ObjectAccessError, match=r"put_object of s3://.*/y is not permitted.*PutObject"):
        client.put_bytes("y", b"1")
    s3.require_credentials(False)
    assert found == b"12345"


def test_a_server_that_is_not_there_is_one_line(s3: S3) -> None:
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        client = make_client(s3, endpoint_url=f"http://127.0.0.1:{port}")
        with pytest.raises(
            ObjectStoreError, match=rf"http://127.0.0.1:{port} cannot be reached.*endpoint_url"
        ):
            client.get_bytes("x")


def test_a_server_that_does_not_answer_is_one_line(s3: S3) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = make_client(s3, endpoint_url=url, timeout_seconds=0.5, attempts=2)
        with pytest.raises(ObjectStoreError, match=r"longer than object_store.timeout_seconds = 0.5"):
            client.get_bytes("x")


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (Answer(400, "AuthorizationHeaderMalformed", "expecting 'eu-west-1'"), "set object_store.region"),
        (Answer(507, "InsufficientStorage"), "has no space for"),
        (Answer(403, "RequestTimeTooSkewed"), "set the clock"),
        (Answer(500, "InternalError"), r"put_object of .* failed \(InternalError: made up\)"),
    ],
)
def test_other_answers_are_one_line(s3: S3, fault: Answer, line: str) -> None:
    s3.proxy.rules.append(lambda request: fault)
    with pytest.raises(ObjectStoreError, match=line):
        make_client(s3).put_bytes("x", b"1")


def test_a_put_whose_answer_was_lost_is_done_once_more(s3: S3) -> None:
    s3.proxy.rules.append(first(1, Swallow(), lambda request: request.method == "PUT"))
    assert make_client(s3).put_bytes("x", b"1")
    assert s3.keys() == {"store/x": 1}
