"""A client of one bucket: requests with retries, whole files and byte ranges, listing and deleting.

s3fs gives the connection pool, the chain of credentials and the event loop, which runs in a thread of its
own; each call here blocks its thread. Retries are made here and nowhere below: a part that failed is sent
again, never the file around it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from eagle3_core.config import ObjectRoot
from eagle3_core.errors import LostObjectError, ObjectStoreError
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store.calls import Call
from eagle3_core.store.connection import shared_connection
from eagle3_core.store.disk import make_room, patiently
from eagle3_core.store.files import HashingWriter, atomic_file
from eagle3_core.store.object_errors import (
    CONDITION_FAILED,
    MISSING_OBJECT,
    MUTE_REFUSALS,
    NOT_SUPPORTED,
    error_code,
    explain,
    is_transient,
)
from eagle3_core.store.object_wire import (
    ObjectFacts,
    allowed_seconds,
    backoff_seconds,
    body_checksum,
    object_facts,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
READ_BLOCK_BYTES = 16 << 20
"""A file is fetched in ranges of this size, several at once."""
READ_BYTES = 1 << 20


class Patience:
    """Pauses between the attempts at one thing, and when to give it up."""

    def __init__(self, attempts: int, outage_seconds: float) -> None:
        self._attempts, self._outage_seconds = attempts, outage_seconds
        self._number, self._started = 0, time.monotonic()

    async def wait(self, problem: Exception, error: BaseException) -> None:
        """Pause before the next attempt, or raise `problem`, caused by `error`, where there is none."""
        self._number += 1
        if self._number >= self._attempts:
            if time.monotonic() - self._started >= self._outage_seconds:
                raise problem from error
            if self._number == self._attempts:
                minutes = self._outage_seconds / 60
                logger.warning("going on for %.0f minutes although: %s", minutes, problem)
        await asyncio.sleep(backoff_seconds(self._number))


class ObjectClient:
    """Requests to one bucket below one prefix.

    Keys are paths below the prefix. All methods raise an `ObjectStoreError` in one clear line:
    `ObjectAccessError` where trying again cannot help, `LostObjectError` for an object that is not there.

    Args:
        root: bucket and prefix.
        settings: how they are reached.
        outage_seconds: go on trying for so long, however many attempts that takes.
    """

    def __init__(self, root: ObjectRoot, settings: ObjectStoreConfig, outage_seconds: float = 0.0) -> None:
        self.root, self.settings, self.outage_seconds = root, settings, outage_seconds
        self._connection = shared_connection(settings)

    def enduring(self, outage_seconds: float) -> ObjectClient:
        """The same client, which goes on trying for so long."""
        other = copy.copy(self)
        other.outage_seconds = outage_seconds
        return other

    def url(self, key: str) -> str:
        """The object's URL."""
        return f"{self.root}/{key}"

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Call[T]:
        """A coroutine of this client for the loop's thread; it has not begun."""
        try:
            return Call(self.fs.loop, coroutine)
        except BaseException:
            coroutine.close()
            raise

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Call[T]:
        """Begin a coroutine of this client in the loop's thread."""
        call = self.call(coroutine)
        call.begin()
        return call

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of this client to its end."""
        return self.start(coroutine).result()

    @property
    def fs(self) -> Any:
        """The file system of s3fs.

        Raises:
            ObjectAccessError: it cannot be made, e.g. for a profile that does not exist.
            HostError: this environment lacks s3fs.
        """
        try:
            return self._connection.fs
        except Exception as error:
            raise explain(error, "connect", str(self.root), self.settings) from error

    @property
    def slots(self) -> asyncio.Semaphore:
        """As many blocks of a file as may be in memory and on their way at once."""
        return self._connection.slots

    async def attempt(
        self, action: str, key: str, operation: Callable[[], Awaitable[T]], expected: Iterable[str] = ()
    ) -> T:
        """Do something as often as the settings allow.

        Args:
            action: its name in errors.
            key: the object, or a prefix.
            operation: makes one attempt.
            expected: codes that the caller handles; such an error is raised as it came.
        """
        patience = self.patience()
        while True:
            try:
                return await operation()
            except ObjectStoreError:
                raise
            except Exception as error:
                if error_code(error) in expected:
                    raise
                problem = explain(error, action, self.url(key), self.settings)
                if not is_transient(error):
                    raise problem from error
                await patience.wait(problem, error)

    def patience(self) -> Patience:
        """How often and how long one thing is tried."""
        return Patience(self.settings.attempts, self.outage_seconds)

    async def request(
        self, method: str, key: str, expected: Iterable[str] = (), **arguments: Any
    ) -> dict[str, Any]:
        """One request about one object, tried again where that may help."""
        return await self.attempt(method, key, partial(self.once, method, key, **arguments), expected)

    async def once(self, method: str, key: str, **arguments: Any) -> dict[str, Any]:
        """One request about one object, given up when it takes too long."""
        async with asyncio.timeout(allowed_seconds(self.settings, len(arguments.get("Body", b"")))):
            return await self.fs._call_s3(
                method, Bucket=self.root.bucket, Key=self.root.key(key), **arguments
            )

    async def read_body(self, key: str, **arguments: Any) -> tuple[bytes, dict[str, Any]]:
        """The body and the rest of one answer, given up when it stands still."""
        answer = await self.once("get_object", key, **arguments)
        blocks: list[bytes] = []
        async with answer["Body"] as body:
            while True:
                async with asyncio.timeout(self.settings.timeout_seconds):
                    block = await body.read(READ_BYTES)
                if not block:
                    return b"".join(blocks), answer
                blocks.append(block)

    async def head_async(self, key: str) -> ObjectFacts | None:
        """As `head`."""
        mode = {"ChecksumMode": "ENABLED"} if self.settings.checksum == "sha256" else {}
        try:
            answer = await self.request("head_object", key, {*MISSING_OBJECT, *MUTE_REFUSALS}, **mode)
        except OSError as error:
            if error_code(error) in MISSING_OBJECT:
                return None
            # An answer to a HEAD has no body that says why; that to a GET has.
            await self.request("get_object", key, Range="bytes=0-0")
            raise explain(error, "head_object", self.url(key), self.settings) from error
        return object_facts(answer)

    def head(self, key: str) -> ObjectFacts | None:
        """What the server says of an object; None where there is none."""
        return self.run(self.head_async(key))

    def heads(self, keys: Sequence[str]) -> list[ObjectFacts | ObjectStoreError | None]:
        """`head` of many objects side by side; an error stands in its object's place."""
        return self.run(self._each(keys, self.head_async))

    async def _each(
        self, keys: Sequence[str], operation: Callable[[str], Awaitable[T]]
    ) -> list[T | ObjectStoreError]:
        """The same for many objects, as many at once as there are connections."""

        async def one(key: str) -> T | ObjectStoreError:
            async with self.slots:
                try:
                    return await operation(key)
                except ObjectStoreError as error:
                    return error

        return list(await asyncio.gather(*map(one, keys)))

    async def range_async(self, key: str, start: int, length: int) -> bytes:
        """As `read_range`."""

        if not length:
            return b""
        last = start + length - 1
        once = partial(self.read_body, key, Range=f"bytes={start}-{last}")
        found, _ = await self.attempt("get_object", key, once)
        if len(found) != length:
            raise LostObjectError(
                f"{self.url(key)} gave {len(found):,} bytes from byte {start:,} on", expected=f"{length:,}"
            )
        return found

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Bytes `[start, start + length)` of an object, not checked against any hash."""
        return self.run(self.range_async(key, start, length))

    async def bytes_async(self, key: str) -> tuple[bytes, ObjectFacts]:
        """A small object and its facts."""

        content, answer = await self.attempt("get_object", key, partial(self.read_body, key))
        return content, object_facts(answer)

    def get_bytes(self, key: str) -> tuple[bytes, ObjectFacts] | None:
        """A small object and its facts; None where there is none."""
        try:
            return self.run(self.bytes_async(key))
        except LostObjectError:
            return None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Small objects side by side, None where there is none."""
        found = self.run(self._each(keys, self.bytes_async))
        for answer in found:
            if isinstance(answer, ObjectStoreError) and not isinstance(answer, LostObjectError):
                raise answer
        return [None if isinstance(answer, ObjectStoreError) else answer[0] for answer in found]

    async def blocks_async(self, key: str, size: int, use: Callable[[bytes], object]) -> None:
        """Read an object in blocks, several at once, and hand them to `use` in order, in another thread."""
        waiting: deque[asyncio.Task[bytes]] = deque()
        starts = iter(range(0, size, READ_BLOCK_BYTES))
        try:
            while True:
                while (
                    len(waiting) < self.settings.max_connections and (start := next(starts, None)) is not None
                ):
                    length = min(READ_BLOCK_BYTES, size - start)
                    waiting.append(asyncio.create_task(self.range_async(key, start, length)))
                if not waiting:
                    return
                await asyncio.to_thread(use, await waiting.popleft())
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def get_file(self, key: str, path: Path, size: int, xxh3_128: str) -> None:
        """Fetch an object to `path`, which appears only if size and hash are right."""
        facts = self.head(key)
        if facts is None or facts.size != size:
            found = f"has {facts.size:,} bytes" if facts else "is not in the bucket"
            raise LostObjectError(
                f"{self.url(key)} {found}",
                expected=f"{size:,} bytes",
                remedy="run the stage that makes it again: it makes what is lost",
            )
        make_room(path.parent, size, path.name)
        fetch = partial(self._fetch, key, path, size, xxh3_128)
        patiently(fetch, path.parent, size, path.name)

    def _fetch(self, key: str, path: Path, size: int, xxh3_128: str) -> None:
        with atomic_file(path) as handle:
            writer = HashingWriter(handle)
            self.run(self.blocks_async(key, size, writer.write))
            if writer.hexdigest() != xxh3_128:
                raise LostObjectError(
                    f"{self.url(key)} does not match its hash",
                    remedy="run the stage that makes it again: it makes what is damaged",
                )

    def put_bytes(
        self, key: str, content: bytes, *, only_new: bool = False, replaces: str | None = None
    ) -> str | None:
        """Put a small object; its content is proven as `object_store.checksum` says.

        Args:
            key: of the object.
            content: its bytes.
            only_new: put it only where there is none.
            replaces: put it only where the present one has this ETag.

        Returns:
            The ETag, or None where the condition does not hold. A server without conditions puts it always.
        """
        condition: dict[str, Any] = {"IfNoneMatch": "*"} if only_new else {}
        if replaces is not None:
            condition = {"IfMatch": replaces}
        return self.run(self._put_bytes(key, content, condition))

    async def _put_bytes(self, key: str, content: bytes, condition: dict[str, Any]) -> str | None:
        checksum = body_checksum(content, self.settings)
        refused = {
            *CONDITION_FAILED,
            *(NOT_SUPPORTED if condition else ()),
            *(MISSING_OBJECT if condition else ()),
        }
        try:
            answer = await self.request("put_object", key, refused, Body=content, **checksum, **condition)
        except OSError as error:
            if condition and error_code(error) in NOT_SUPPORTED:
                return await self._put_bytes(key, content, {})
            if condition and error_code(error) in {*CONDITION_FAILED, *MISSING_OBJECT}:
                return None
            raise explain(error, "put_object", self.url(key), self.settings) from error
        if self.settings.checksum == "read_back" and (await self.bytes_async(key))[0] != content:
            raise LostObjectError(f"{self.url(key)} was not stored as it was sent", remedy="run it again")
        return str(answer.get("ETag", "")).strip('"')

    async def pages(self, method: str, prefix: str, markers: dict[str, str]) -> list[dict[str, Any]]:
        """All pages of a listing below a prefix.

        Args:
            method: of the API.
            prefix: below the root.
            markers: request parameter to the field of the answer that it takes on the next page.
        """
        pages: list[dict[str, Any]] = []
        arguments = {"Bucket": self.root.bucket, "Prefix": self.root.key(prefix)}
        while True:
            answer = await self.attempt(method, prefix, partial(self._page, method, arguments))
            pages.append(answer)
            if not answer.get("IsTruncated"):
                return pages
            arguments |= {name: answer[field] for name, field in markers.items() if answer.get(field)}

    async def _page(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(allowed_seconds(self.settings, 0)):
            return await self.fs._call_s3(method, **arguments)

    def list(self, prefix: str) -> dict[str, int]:
        """Key and bytes of every object whose key starts with `prefix`."""
        pages = self.run(
            self.pages("list_objects_v2", prefix, {"ContinuationToken": "NextContinuationToken"})
        )
        cut = len(self.root.key(""))
        return {one["Key"][cut:]: one["Size"] for page in pages for one in page.get("Contents", ())}

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects side by side; one that is not there is no error.

        One request an object: a request for many needs a checksum that not every server knows.
        """

        async def one(key: str) -> None:
            await self.request("delete_object", key)

        for answer in self.run(self._each(keys, one)):
            if isinstance(answer, ObjectStoreError) and not isinstance(answer, LostObjectError):
                raise answer
