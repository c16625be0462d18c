from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.doubles.s3 import S3, running_s3


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3]:
    """One S3 server for a module."""
    with running_s3() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3) -> S3:
    """The server with an empty bucket and no faults."""
    s3_server.reset()
    return s3_server
