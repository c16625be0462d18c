"""The API server in a process of its own."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.orchestrator


def test_nobody_can_take_the_port_of_a_server_that_does_not_listen_yet(tmp_path, monkeypatch):
    from flows.embedded_server import EmbeddedServer

    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))  # its database is not begun where others go on with it
    server = EmbeddedServer(tmp_path / "server.log")
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use") as caught:
            other.bind(("127.0.0.1", urlsplit(server.api_url).port))
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        server.stop()
