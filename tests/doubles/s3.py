"""A real S3 server (moto, over HTTP) and a proxy before it that damages chosen requests.

The proxy works on the wire: it reads a request, asks its rules what shall happen to it, and passes it on,
cuts the connection in the middle of it, slows it down or answers itself.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks.s3_server import empty_s3_server

BUCKET = "captured-states"
MIB = 1 << 20
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing-key",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}
BLOCK = 1 << 16


@dataclass(frozen=True)
class Request:
    """One request as it came over the wire; header names in lower case."""

    method: str
    target: str
    headers: dict[str, str]

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)

    @property
    def part(self) -> int | None:
        """The number of the part that is uploaded, or None."""
        numbers = self.query.get("partNumber") if self.method == "PUT" else None
        return int(numbers[0]) if numbers else None

    @property
    def is_complete(self) -> bool:
        """Whether it completes an upload in parts."""
        return self.method == "POST" and "uploadId" in self.query


@dataclass(frozen=True)
class Cut:
    """Close the connection after so many bytes of the request's body, or of the answer."""

    after: int
    in_answer: bool = False


@dataclass(frozen=True)
class Answer:
    """Answer without asking the server."""

    status: int
    code: str = ""
    message: str = "made up"

    @property
    def body(self) -> bytes:
        error = f"<Error><Code>{self.code}</Code><Message>{self.message}</Message></Error>"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{error}'.encode() if self.code else b""


@dataclass(frozen=True)
class Slow:
    """Pass a request's body on at so many bytes a second."""

    bytes_per_second: float


@dataclass(frozen=True)
class Swallow:
    """Let the server do it, and lose the answer."""


@dataclass(frozen=True)
class Without:
    """Pass a request on without these headers, as for a server that does not know them."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Flip:
    """Change a bit of a request's body; a checksum header is then checked as S3 does, which moto does not."""


Fault = Cut | Answer | Slow | Swallow | Without | Flip
Rule = Callable[[Request], Fault | None]


def first(count: int, fault: Fault, when: Callable[[Request], bool]) -> Rule:
    """A rule for the first `count` requests of a kind."""
    numbers = itertools.count()
    return lambda request: fault if when(request) and next(numbers) < count else None


def refuse_checksums(request: Request) -> Fault | None:
    """A server that knows no additional checksums, neither as headers nor in trailers."""
    known = any(
        name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer"))
        for name in request.headers
    )
    if known and request.headers.get("x-amz-checksum-mode") is None:
        return Answer(400, "InvalidArgument", "unknown header or trailer: x-amz-checksum-sha256")
    return None


@dataclass
class Proxy:
    """Passes requests on to a server; `rules` are asked in order, and `seen` are all requests so far."""

    upstream: tuple[str, int]
    rules: list[Rule] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed, self._num_open = threading.Condition(), 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def parts(self) -> dict[int, int]:
        """How often each part was sent."""
        counts: dict[int, int] = {}
        for request in self.seen:
            if request.part is not None:
                counts[request.part] = counts.get(request.part, 0) + 1
        return counts

    def settle(self) -> None:
        """Wait until the server has done all that was sent so far, also by clients that have been killed."""
        address = urlsplit(self.url)
        with socket.create_connection((address.hostname, address.port)) as last:
            last.shutdown(socket.SHUT_WR)
            last.recv(1)  # its turn has come: those before it have been accepted
        with self._changed:
            assert self._changed.wait_for(lambda: not self._num_open, 120), "requests do not end"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                self._num_open += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            self._serve_one(client)
        finally:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()

    def _serve_one(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, ValueError):
            head = _read_head(client)
            if not head:
                return
            request = _parse(head)
            self.seen.append(request)
            fault = next(filter(None, (rule(request) for rule in self.rules)), None)
            if request.headers.get("expect"):
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._pass_on(client, request, head, fault)

    def _pass_on(self, client: socket.socket, request: Request, head: bytes, fault: Fault | None) -> None:
        length = int(request.headers.get("content-length", 0))
        if isinstance(fault, Answer):
            _discard(client, length)
            _answer(client, fault, request.method)
            return
        blocks = _body(client, length)
        if isinstance(fault, Flip):
            body = b"".join(block for _, block in blocks)
            damaged = body[:-1] + bytes([body[-1] ^ 1])
            if not _has_its_checksum(request, damaged):
                _answer(client, Answer(400, "BadDigest"), request.method)
                return
            blocks = iter([(0, damaged)])
        with socket.create_connection(self.upstream) as server:
            server.sendall(_one_request(head, fault.names if isinstance(fault, Without) else ()))
            for sent, block in blocks:
                if isinstance(fault, Cut) and not fault.in_answer and sent >= fault.after:
                    return
                if isinstance(fault, Slow):
                    time.sleep(len(block) / fault.bytes_per_second)
                server.sendall(block)
            passed = 0
            while block := server.recv(BLOCK):
                if isinstance(fault, Swallow):
                    continue
                if isinstance(fault, Cut) and fault.in_answer and passed + len(block) > fault.after:
                    client.sendall(block[: max(0, fault.after - passed)])
                    return
                client.sendall(block)
                passed += len(block)


def _read_head(client: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = client.recv(1)
        if not byte:
            return b""
        head += byte
    return head


def _parse(head: bytes) -> Request:
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
    return Request(method, target, {name.strip().lower(): value.strip() for name, value in pairs})


def _one_request(head: bytes, left_out: tuple[str, ...]) -> bytes:
    """The head with a request to close the connection after it, and without the wish to be asked on."""
    names = "|".join(map(re.escape, ("connection", "expect", *left_out)))
    text = re.sub(rf"(?im)^({names}):.*\r\n".encode(), b"", head)
    return text[:-2] + b"Connection: close\r\n\r\n"


def _body(client: socket.socket, length: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of a body, each with the number of bytes before it."""
    sent = 0
    while sent < length:
        block = client.recv(min(BLOCK, length - sent))
        if not block:
            raise OSError("the client has gone")
        yield sent, block
        sent += len(block)


def _has_its_checksum(request: Request, body: bytes) -> bool:
    """Whether a body is what the headers of its request say, as far as they say it."""
    digests = {
        "content-md5": hashlib.md5(body, usedforsecurity=False).digest(),
        "x-amz-checksum-sha256": hashlib.sha256(body).digest(),
    }
    found = {name: base64.b64encode(digest).decode() for name, digest in digests.items()}
    return all(request.headers.get(name, value) == value for name, value in found.items())


def _discard(client: socket.socket, length: int) -> None:
    for _ in _body(client, length):
        pass


def _answer(client: socket.socket, answer: Answer, method: str) -> None:
    lines = [f"HTTP/1.1 {answer.status} Made up", f"Content-Length: {len(answer.body)}"]
    lines += ["Content-Type: application/xml", "Connection: close", "", ""]
    client.sendall("\r\n".join(lines).encode() + (b"" if method == "HEAD" else answer.body))


@dataclass
class S3:
    """A running server with an empty bucket and a proxy before it."""

    url: str
    proxy: Proxy
    _clients: dict[str, Any] = field(default_factory=dict)

    def client(self, service: str = "s3") -> Any:
        """A client of botocore that goes round the proxy."""
        if service not in self._clients:
            import botocore.session

            keys = {"aws_access_key_id": "testing-key", "aws_secret_access_key": "testing-secret"}
            session = botocore.session.get_session()
            self._clients[service] = session.create_client(
                service, endpoint_url=self.url, region_name="us-east-1", **keys
            )
        return self._clients[service]

    def keys(self, prefix: str = "") -> dict[str, int]:
        """Key and bytes of every object."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", ())}

    def open_uploads(self) -> list[str]:
        """Keys of the uploads in parts that are neither completed nor aborted."""
        answer = self.client().list_multipart_uploads(Bucket=BUCKET)
        return [one["Key"] for one in answer.get("Uploads", ())]

    def reset(self) -> None:
        """An empty bucket, no faults."""
        self.proxy.rules.clear()
        self.proxy.seen.clear()
        self.require_credentials(False)
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")).read()
        self.client().create_bucket(Bucket=BUCKET)

    def require_credentials(self, wanted: bool) -> None:
        """Let the server check credentials and permissions, or take any."""
        count = b"0" if wanted else b"inf"
        plain = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.url}/moto-api/reset-auth", count, plain, method="POST")
        urllib.request.urlopen(request).read()

    def make_user(self, *actions: str) -> dict[str, str]:
        """The variables of a user who may do `actions` only; make it before credentials are required."""
        iam = self.client("iam")
        iam.create_user(UserName="limited")
        statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName="limited", PolicyName="limits", PolicyDocument=policy)
        key = iam.create_access_key(UserName="limited")["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


@contextlib.contextmanager
def running_s3() -> Iterator[S3]:
    """A server for a module of tests; credentials that it takes are in the environment."""
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    url = empty_s3_server()
    proxy = Proxy(("127.0.0.1", int(url.rpartition(":")[2])))
    try:
        yield S3(url, proxy)
    finally:
        proxy.close()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
