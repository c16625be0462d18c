"""What goes over the wire to an object store: settings of the client, checksums of bodies, facts."""

from __future__ import annotations

import base64
import hashlib
import os
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from eagle3_core.sections import ObjectStoreConfig

CONNECT_SECONDS = 10.0
SLOWEST_BYTES_PER_SECOND = 128 << 10
"""A request with a body gets as much more time as the body takes at this speed."""
HASH_METADATA = "xxh3-128"


@dataclass(frozen=True)
class ObjectFacts:
    """What the server says of an object.

    Attributes:
        size: bytes.
        etag: without quotes.
        sha256: the additional checksum, of the parts' checksums where there were parts; None without one.
        xxh3_128: the hash of the content that the uploader stated.
        age_seconds: since the object was put, by the server's clock.
    """

    size: int
    etag: str
    sha256: str | None
    xxh3_128: str | None
    age_seconds: float


def body_checksum(body: bytes, settings: ObjectStoreConfig) -> dict[str, str]:
    """The arguments of a request by which the server checks the body that it gets."""
    if settings.checksum == "sha256":
        digest = hashlib.sha256(body).digest()
        return {"ChecksumSHA256": base64.b64encode(digest).decode(), "ChecksumAlgorithm": "SHA256"}
    if settings.checksum == "etag":
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        return {"ContentMD5": base64.b64encode(digest).decode()}
    return {}


def backoff_seconds(number: int) -> float:
    """Pause after attempt `number` (from 1): doubles up to 20 s, spread so that parts do not keep step."""
    return min(20.0, 0.2 * 2**number) * random.uniform(0.5, 1.0)


def allowed_seconds(settings: ObjectStoreConfig, body_bytes: int) -> float:
    """How long a request may take."""
    return settings.timeout_seconds + body_bytes / SLOWEST_BYTES_PER_SECOND


def client_settings(settings: ObjectStoreConfig) -> dict[str, Any]:
    """Settings of the client below: no retries, no checksums of its own choice.

    Over TLS the body is not hashed once more for the signature, which covers the checksum header.
    """
    endpoint = (
        settings.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    is_plain = bool(endpoint and endpoint.startswith("http://"))
    return {
        "max_pool_connections": settings.max_connections + 2,
        "connect_timeout": min(CONNECT_SECONDS, settings.timeout_seconds),
        # Also runs while a body is being sent: the limits that count are set around each request.
        "read_timeout": allowed_seconds(settings, int(settings.part_bytes)) + CONNECT_SECONDS,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        **({} if is_plain else {"s3": {"payload_signing_enabled": False}}),
    }


def object_facts(answer: dict[str, Any]) -> ObjectFacts:
    put: datetime | None = answer.get("LastModified")
    stated = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    now = parsedate_to_datetime(stated) if stated else datetime.now(UTC)
    return ObjectFacts(
        size=int(answer["ContentLength"]),
        etag=str(answer.get("ETag", "")).strip('"'),
        sha256=answer.get("ChecksumSHA256"),
        xxh3_128=answer.get("Metadata", {}).get(HASH_METADATA),
        age_seconds=max(0.0, (now - put).total_seconds()) if put else 0.0,
    )
