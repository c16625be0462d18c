"""Sections of a store in a bucket and of what may leave a store."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from eagle3_core.sections.base import Section


class ObjectStoreConfig(Section):
    """How a store in `s3://` is reached; credentials come from the usual chain of AWS clients."""

    endpoint_url: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+(/.*)?$",
        description="URL of an S3-compatible server; None takes `AWS_ENDPOINT_URL` or AWS itself.",
    )
    region: str | None = Field(
        default=None, description="Region of the bucket; None takes `AWS_REGION` or the profile's."
    )
    checksum: Literal["sha256", "etag", "read_back"] = Field(
        default="sha256",
        description="How an upload is proven: SHA-256 checksums sent with every part and compared with the "
        "object's; Content-MD5 and the ETag, for servers that refuse checksum headers; or the object read "
        "back and hashed, for servers whose ETag is no MD5.",
    )
    part_bytes: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=5 << 20,
        le=5 << 30,
        description="Larger files are uploaded in parts of this size, each retried alone; `max_connections` "
        "of them are in memory at once.",
    )
    max_connections: int = Field(default=8, ge=1, le=128, description="Requests to the store at once.")
    attempts: int = Field(default=6, ge=1, le=20, description="Attempts of a request or a part.")
    outage_minutes: float = Field(
        default=30.0,
        ge=0,
        description="Uploads in the background and training's reads go on trying for this long while the "
        "store cannot be reached.",
    )
    timeout_seconds: float = Field(
        default=60.0,
        gt=0,
        description="A request without an answer for this long is given up; an upload gets the time that its "
        "bytes take at 128 KiB/s on top.",
    )
    upload_backlog_bytes: ByteSize = Field(
        default=ByteSize(8 << 30),
        ge=0,
        description="Finished files that may wait for their upload; with more, who makes them waits.",
    )
    cache_bytes: ByteSize = Field(
        default=ByteSize(16 << 30), ge=0, description="Local cache of samples that training reads."
    )
    read_ahead_bytes: ByteSize = Field(
        default=ByteSize(512 << 20), ge=0, description="Samples fetched before training asks for them."
    )


class RetentionConfig(Section):
    """What `eagle3 gc` and the stage cleanup move to the trash; the default names nothing.

    A policy names artifacts; what a kept artifact was made from, what a run uses, and a capture that no newer
    verified one replaces stay all the same.
    """

    keep_last_captures: int | None = Field(
        default=None, ge=1, description="Name all captures of a target but its newest complete ones."
    )
    older_than_days: float | None = Field(
        default=None, gt=0, le=36_500, description="Name every artifact that was made longer ago."
    )
    max_bytes: ByteSize | None = Field(
        default=None,
        ge=0,
        description="Name the oldest captures until the artifacts of the store take no more than this.",
    )
    unreferenced: bool = Field(
        default=False, description="Name captures and data from which no kept checkpoint was trained."
    )
    keep: tuple[str, ...] = Field(
        default=(),
        description="Artifacts (`KIND/ID`) that stay whatever a policy says, and what they were made from.",
    )
    purge_after_days: float = Field(
        default=7.0,
        ge=0,
        le=36_500,
        description="With a policy above, the stage cleanup removes for good what lies in the trash longer.",
    )

    @property
    def names_something(self) -> bool:
        """Whether any policy is set."""
        return self.unreferenced or any(
            limit is not None for limit in (self.keep_last_captures, self.older_than_days, self.max_bytes)
        )
