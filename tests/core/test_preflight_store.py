"""Preflight writes into the store: what is wrong with it is one line before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.errors import ConfigError, Eagle3Error, HostError, ObjectAccessError
from eagle3_core.preflight import CHECKS
from tests.doubles.s3 import BUCKET, S3, refuse_checksums, running_s3


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with running_s3() as running:
        yield running


@pytest.fixture
def s3(server: S3) -> S3:
    server.reset()
    return server


def config(tmp_path: Path, store: str, **object_store: object) -> RunConfig:
    document = {"name": "x", "target": {"model": "smollm2-135m"}, "workspace": str(tmp_path)}
    return parse_config(document | {"store": store, "object_store": object_store})


def failure(config: RunConfig) -> str:
    with pytest.raises(Eagle3Error) as caught:
        CHECKS["store"](config)
    assert isinstance(caught.value, HostError | ObjectAccessError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_bucket_that_can_be_written_passes_and_keeps_nothing(s3: S3, tmp_path: Path) -> None:
    found = CHECKS["store"](config(tmp_path, f"s3://{BUCKET}/a/b", endpoint_url=s3.url))
    assert found == f"s3://{BUCKET}/a/b at {s3.url} can be written; uploads are proven by sha256"
    assert s3.keys() == {}


def test_the_endpoint_of_the_environment_is_used(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    assert "can be written" in CHECKS["store"](config(tmp_path, f"s3://{BUCKET}"))


def test_wrong_credentials(s3: S3, tmp_path: Path) -> None:
    s3.require_credentials(True)
    line = failure(config(tmp_path, f"s3://{BUCKET}", endpoint_url=s3.url))
    s3.require_credentials(False)
    assert line.startswith(f"{s3.url} does not accept the credentials for s3://{BUCKET}/")


def test_a_missing_bucket(s3: S3, tmp_path: Path) -> None:
    line = failure(config(tmp_path, "s3://nowhere/x", endpoint_url=s3.url))
    assert line.startswith("the bucket of s3://nowhere/x")
    assert line.endswith("make it, or set `store` and object_store.endpoint_url right")


def test_a_bucket_that_may_only_be_read(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.make_user("s3:Get*", "s3:List*").items():
        monkeypatch.setenv(name, value)
    s3.require_credentials(True)
    line = failure(config(tmp_path, f"s3://{BUCKET}", endpoint_url=s3.url))
    s3.require_credentials(False)
    assert line.startswith(f"put_object of s3://{BUCKET}/")
    assert "is not permitted" in line


def test_a_server_that_refuses_checksums(s3: S3, tmp_path: Path) -> None:
    s3.proxy.rules.append(refuse_checksums)
    refused = config(tmp_path, f"s3://{BUCKET}", endpoint_url=s3.proxy.url)
    assert failure(refused).endswith("set object_store.checksum to `etag`")
    taken = config(tmp_path, f"s3://{BUCKET}", endpoint_url=s3.proxy.url, checksum="etag")
    assert "proven by etag" in CHECKS["store"](taken)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = failure(config(tmp_path, str(tmp_path / "file" / "store")))
    assert line.startswith(f"cannot write to {tmp_path / 'file' / 'store'}")
    assert line.endswith("set `store` to a folder that can be written")


@pytest.mark.parametrize("store", ["s3://", "s3://UPPER/x", "gs://bucket/x", "s3://bucket/a/../b"])
def test_a_url_that_names_no_bucket_is_refused_by_the_configuration(tmp_path: Path, store: str) -> None:
    with pytest.raises(ConfigError, match=r"store: .*a store is a folder or s3://BUCKET/PREFIX"):
        config(tmp_path, store)
