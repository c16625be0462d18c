"""Uploads of whole files: in parts, each retried alone, proven before anybody may rely on them.

    local hash checked -> begin -> stale uploads aborted -> parts side by side -> complete -> proof

Whatever ends an upload early, also a cancellation, aborts it, so that no parts are left in the bucket. What a
killed process leaves is aborted when its artifact is written the next time.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from eagle3_core.artifacts import FileEntry
from eagle3_core.errors import LostObjectError, ObjectAccessError, ObjectStoreError, StoreError
from eagle3_core.store.files import hash_file
from eagle3_core.store.object_errors import (
    MISSING_UPLOAD,
    TAKE_LESS,
    error_code,
    explain,
    is_transient,
)
from eagle3_core.store.object_wire import (
    HASH_METADATA,
    ObjectFacts,
    backoff_seconds,
    body_checksum,
)
from eagle3_core.store.objects import ObjectClient

logger = logging.getLogger(__name__)
MAX_PARTS = 10_000
ABORT_ROUNDS = 5
BEGIN_SECONDS = 5.0
"""How long a cancelled upload waits for the answer to its begin."""
PROOF_FACT = "object"
"""Under this name a manifest entry's facts say how the object was proven."""


@dataclass(frozen=True)
class Part:
    """A stretch of a file; numbers start at 1."""

    number: int
    start: int
    length: int


@dataclass(frozen=True)
class Sent:
    """A part that the server has accepted, with the digest of what was sent."""

    number: int
    etag: str
    digest: bytes


def plan_parts(size: int, part_bytes: int) -> list[Part]:
    """The parts of a file, at most 10,000; one where the file is no larger than a part."""
    length = max(part_bytes, -(-size // MAX_PARTS))
    starts = range(0, size, length) if size else (0,)
    return [Part(number, start, min(length, size - start)) for number, start in enumerate(starts, start=1)]


def proof_facts(facts: ObjectFacts) -> dict[str, Any]:
    """What a manifest entry keeps of a proven object."""
    return {"etag": facts.etag} | ({"sha256": facts.sha256} if facts.sha256 else {})


def object_problem(url: str, entry: FileEntry, facts: ObjectFacts | None) -> str | None:
    """Why an object is not the one that a manifest entry was proven with, or None."""
    if facts is None:
        return f"{url} is not in the bucket"
    if facts.size != entry.bytes:
        return f"{url} has {facts.size:,} bytes, its manifest says {entry.bytes:,}"
    proof = entry.facts.get(PROOF_FACT) or {}
    if facts.sha256 and proof.get("sha256"):
        is_same = _same_checksum(facts.sha256, proof["sha256"])
        return None if is_same else f"{url} has another SHA-256 than when it was put"
    if proof.get("etag") and facts.etag != proof["etag"]:
        return f"{url} has another ETag than when it was put"
    if facts.xxh3_128 and facts.xxh3_128 != entry.xxh3_128:
        return f"{url} was put with another hash"
    return None


async def upload(client: ObjectClient, path: Path, key: str, entry: FileEntry) -> FileEntry:
    """Put a finished file; returns its entry with the proof.

    An object of the same content that is there already, from an upload whose process died before it could say
    so, is taken.

    Raises:
        StoreError: the local file is not what its entry says.
        ObjectStoreError: it could not be put or proven; nothing of it is left in the bucket.
    """
    there = await client.head_async(key)
    if there is None or not await _is_proven(client, key, entry, there):
        try:
            there = await _put(client, path, key, entry)
        except LostObjectError as error:
            logger.warning("once more: %s", error)
            there = await _put(client, path, key, entry)
    return entry.model_copy(update={"facts": entry.facts | {PROOF_FACT: proof_facts(there)}})


async def _put(client: ObjectClient, path: Path, key: str, entry: FileEntry) -> ObjectFacts:
    """Put a file and prove it."""
    await _check_local(path, entry)
    parts = plan_parts(entry.bytes, int(client.settings.part_bytes))
    put = _put_parts if len(parts) > 1 else _put_whole
    expected = await put(client, path, key, entry, parts)
    return await _prove(client, key, entry, expected)


async def _is_proven(client: ObjectClient, key: str, entry: FileEntry, there: ObjectFacts) -> bool:
    """Whether the object that is there was put with this content, each part of it checked by the server."""
    if there.size != entry.bytes or there.xxh3_128 != entry.xxh3_128:
        return False
    checksum = client.settings.checksum
    if checksum == "read_back":
        return await _remote_hash(client, key, there.size) == entry.xxh3_128
    return checksum == "etag" or there.sha256 is not None


async def _check_local(path: Path, entry: FileEntry) -> None:
    """What is sent must be what was written: checksums of parts only see what happens after the read."""
    try:
        size, digest = path.stat().st_size, await asyncio.to_thread(hash_file, path)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read for its upload ({error.strerror or error})",
            remedy="run the stage that makes it again",
        ) from error
    if size != entry.bytes or digest != entry.xxh3_128:
        raise StoreError(
            f"{path} does not match its hash and is not uploaded", remedy="run the stage that makes it again"
        )


async def _put_whole(
    client: ObjectClient, path: Path, key: str, entry: FileEntry, parts: Sequence[Part]
) -> str | None:
    """One request for a small file; returns the expected proof."""
    async with client.slots:
        body = await asyncio.to_thread(_read, path, parts[0])
        checksum = await asyncio.to_thread(body_checksum, body, client.settings)
        metadata = {HASH_METADATA: entry.xxh3_128}
        await client.request("put_object", key, Body=body, Metadata=metadata, **checksum)
    return _expected([_digest(checksum)], is_whole=True, checksum=client.settings.checksum)


async def _put_parts(
    client: ObjectClient, path: Path, key: str, entry: FileEntry, parts: Sequence[Part]
) -> str | None:
    """A multipart upload; returns the expected proof."""
    begun = asyncio.ensure_future(_create(client, key, entry.xxh3_128))
    try:
        upload_id = await asyncio.shield(begun)
        # What a killed process has left, and an upload whose begin was not answered.
        await abort_uploads(client, key, keep=upload_id)
        sent = await _all([partial(_put_part, client, path, key, upload_id, part) for part in parts])
        await _complete(client, key, upload_id, sent)
    except BaseException:
        await asyncio.shield(_abort_begun(client.enduring(0.0), key, begun))
        raise
    digests = [one.digest for one in sent]
    return _expected(digests, is_whole=False, checksum=client.settings.checksum)


async def _create(client: ObjectClient, key: str, xxh3_128: str) -> str:
    algorithm = {"ChecksumAlgorithm": "SHA256"} if client.settings.checksum == "sha256" else {}
    metadata = {HASH_METADATA: xxh3_128}
    created = await client.request("create_multipart_upload", key, Metadata=metadata, **algorithm)
    return created["UploadId"]


async def try_parts(client: ObjectClient, key: str) -> None:
    """Begin and abort an upload in parts, to see that it is permitted."""
    try:
        await _create(client, key, "0" * 32)
    finally:
        await abort_uploads(client, key)


async def _all(operations: Sequence[partial[Any]]) -> list[Any]:
    """Run operations side by side; where one fails the others are cancelled and have ended."""
    tasks = [asyncio.create_task(operation()) for operation in operations]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _put_part(client: ObjectClient, path: Path, key: str, upload_id: str, part: Part) -> Sent:
    async with client.slots:
        body = await asyncio.to_thread(_read, path, part)
        checksum = await asyncio.to_thread(body_checksum, body, client.settings)
        answer = await client.request(
            "upload_part", key, UploadId=upload_id, PartNumber=part.number, Body=body, **checksum
        )
    return Sent(part.number, answer["ETag"], _digest(checksum))


async def _complete(client: ObjectClient, key: str, upload_id: str, sent: Sequence[Sent]) -> None:
    """Complete an upload; after a lost answer, or an error under status 200, look whether it is done."""
    is_sha256 = client.settings.checksum == "sha256"
    listed = [
        {"PartNumber": one.number, "ETag": one.etag}
        | ({"ChecksumSHA256": base64.b64encode(one.digest).decode()} if is_sha256 else {})
        for one in sent
    ]
    arguments = {"UploadId": upload_id, "MultipartUpload": {"Parts": listed}}
    url = client.url(key)
    patience = client.patience()
    while True:
        try:
            await client.once("complete_multipart_upload", key, **arguments)
            return
        except Exception as error:
            problem = explain(error, "complete_multipart_upload", url, client.settings)
            may_be_done = is_transient(error) or error_code(error) in MISSING_UPLOAD
            if not may_be_done:
                raise problem from error
            if not await _is_open(client, key, upload_id):
                return  # it was completed and only the answer was lost; the proof tells
            await patience.wait(problem, error)


async def _is_open(client: ObjectClient, key: str, upload_id: str) -> bool:
    """Whether an upload has been neither completed nor aborted."""
    try:
        await client.request("list_parts", key, MISSING_UPLOAD, UploadId=upload_id, MaxParts=1)
    except OSError as error:
        if error_code(error) in MISSING_UPLOAD:
            return False
        raise
    return True


async def _prove(client: ObjectClient, key: str, entry: FileEntry, expected: str | None) -> ObjectFacts:
    """Compare the object's size and hash with what was sent; one that differs is removed.

    Raises:
        LostObjectError: it is not there or differs.
        ObjectAccessError: the server does not keep what proves it.
    """
    url, checksum = client.url(key), client.settings.checksum
    facts = await client.head_async(key)
    if facts is None:
        raise LostObjectError(f"{url} is not in the bucket after its upload", remedy="run it again")
    if checksum == "sha256" and facts.sha256 is None:
        raise ObjectAccessError(
            f"the server keeps no SHA-256 of {url}",
            remedy=f"set object_store.checksum to `{TAKE_LESS[checksum]}`",
        )
    found = {"sha256": facts.sha256, "etag": facts.etag, "read_back": None}[checksum]
    if checksum == "read_back" and facts.size == entry.bytes:
        found, expected = await _remote_hash(client, key, facts.size), entry.xxh3_128
    if facts.size == entry.bytes and _same_checksum(found, expected):
        return facts
    await client.request("delete_object", key)
    doubt = "if its ETags are no MD5 (encryption with KMS), set object_store.checksum to `read_back`"
    raise LostObjectError(
        f"{url} has {facts.size:,} bytes and {checksum} {found} after its upload",
        expected=f"{entry.bytes:,} bytes and {expected}",
        remedy=f"run it again{'; ' + doubt if checksum == 'etag' else ''}",
    )


def _same_checksum(found: str | None, expected: str | None) -> bool:
    """Compare two checksums; servers differ in whether they state the number of parts (`-3`) too."""
    if found is None or expected is None:
        return False
    (one, _, parts), (other, _, wanted) = found.partition("-"), expected.partition("-")
    return one == other and (not parts or not wanted or parts == wanted)


async def _remote_hash(client: ObjectClient, key: str, size: int) -> str:
    digest = xxhash.xxh3_128()
    await client.blocks_async(key, size, digest.update)
    return digest.hexdigest()


async def open_uploads(client: ObjectClient, prefix: str) -> list[tuple[str, str]]:
    """Key and id of every multipart upload below a prefix that is neither completed nor aborted."""
    markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
    pages = await client.pages("list_multipart_uploads", prefix, markers)
    cut = len(client.root.key(""))
    return [(one["Key"][cut:], one["UploadId"]) for page in pages for one in page.get("Uploads", ())]


async def abort_uploads(client: ObjectClient, prefix: str, keep: str | None = None) -> int:
    """Abort the multipart uploads of a key, or below a prefix that ends with `/`, and see that none is left.

    Returns how many there were.

    The caller holds the artifact, so that nobody else uploads there. A part that was on its way while its
    upload was aborted may be kept by the server, so it is looked again.
    """
    found: set[str] = set()
    for number in range(1, ABORT_ROUNDS + 1):
        opened = [one for one in await open_uploads(client, prefix) if one[1] != keep]
        uploads = [one for one in opened if prefix.endswith("/") or one[0] == prefix]
        if not uploads:
            return len(found)
        for key, upload_id in uploads:
            found.add(upload_id)
            try:
                await client.request("abort_multipart_upload", key, MISSING_UPLOAD, UploadId=upload_id)
            except OSError as error:
                if error_code(error) not in MISSING_UPLOAD:
                    raise
        if number > 1:
            await asyncio.sleep(backoff_seconds(number))
    raise ObjectStoreError(
        f"{len(uploads)} uploads of {client.url(prefix)} cannot be aborted", remedy="abort them by hand"
    )


async def _abort_begun(client: ObjectClient, key: str, begun: asyncio.Future[str]) -> None:
    """Abort an upload that failed; if that fails too, the first error is the one to tell.

    A begin that is on its way is waited for: given up, it could reach the server after the abort.
    """
    await asyncio.wait([begun], timeout=BEGIN_SECONDS)
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    try:
        await abort_uploads(client, key)
    except ObjectStoreError as error:
        logger.warning("parts may be left in the bucket until the next run: %s", error)


def _expected(digests: Sequence[bytes], is_whole: bool, checksum: str) -> str | None:
    """The checksum that the server must state: of the body, or of the parts' checksums with their number."""
    if checksum == "read_back":
        return None
    if checksum == "sha256":
        digest = digests[0] if is_whole else hashlib.sha256(b"".join(digests)).digest()
        text = base64.b64encode(digest).decode()
    else:
        digest = digests[0] if is_whole else hashlib.md5(b"".join(digests), usedforsecurity=False).digest()
        text = digest.hex()
    return text if is_whole else f"{text}-{len(digests)}"


def _digest(checksum: dict[str, str]) -> bytes:
    return base64.b64decode(checksum.get("ChecksumSHA256") or checksum.get("ContentMD5") or "")


def _read(path: Path, part: Part) -> bytes:
    """A part's bytes.

    Raises:
        StoreError: the file has become shorter.
    """
    with path.open("rb", buffering=0) as handle:
        handle.seek(part.start)
        blocks, left = [], part.length
        while left and (block := handle.read(left)):
            blocks.append(block)
            left -= len(block)
    if left:
        raise StoreError(f"{path} became shorter while it was uploaded", remedy="run the stage again")
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)
