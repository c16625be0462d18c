"""The connections of this process to object stores: one for all clients with the same settings."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import lru_cache
from typing import Any

from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store.object_wire import client_settings


class Connection:
    """A file system of s3fs, whose pool, credentials and event loop several clients share.

    Args:
        settings: of the store.
    """

    def __init__(self, settings: ObjectStoreConfig) -> None:
        self._settings = settings
        self._fs: Any = None
        self._process = 0
        self._slots: asyncio.Semaphore | None = None
        self._connecting = threading.Lock()

    @property
    def fs(self) -> Any:
        """The file system of this process; a forked child gets its own."""
        with self._connecting:
            if self._fs is None or self._process != os.getpid():
                self._fs, self._process = self._connect(), os.getpid()
                self._slots = asyncio.Semaphore(self._settings.max_connections)
            return self._fs

    @property
    def slots(self) -> asyncio.Semaphore:
        """As many blocks of a file as may be in memory and on their way at once."""
        assert self._slots is not None
        return self._slots

    def _connect(self) -> Any:
        from s3fs import S3FileSystem

        settings = self._settings
        fs = S3FileSystem(
            endpoint_url=settings.endpoint_url,
            client_kwargs={"region_name": settings.region} if settings.region else {},
            config_kwargs=client_settings(settings),
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        fs.retries = 1  # retries are the client's
        return fs


def shared_connection(settings: ObjectStoreConfig) -> Connection:
    """The connection for these settings and the credentials that the environment names now."""
    wanted = {"endpoint_url", "region", "part_bytes", "max_connections", "timeout_seconds"}
    same = ObjectStoreConfig.model_validate(settings.model_dump(include=wanted))
    return _connection(same, tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_"))))


@lru_cache(maxsize=8)
def _connection(settings: ObjectStoreConfig, environment: tuple[tuple[str, str], ...]) -> Connection:
    return Connection(settings)
