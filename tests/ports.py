"""Ports for servers of tests."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def quiet_port() -> int:
    """A free port of 127.0.0.1 of those that the kernel gives to nobody who asks for any port.

    There is room above it for servers that take the next ones too.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    others = {*range(10_000, 60_000)} - {*range(int(given[0]), int(given[1]) + 1)}
    for port in random.sample(sorted(others), len(others)):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")
