"""Whole files of an artifact one after another; the next one is fetched while the caller works on one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from eagle3_core.artifacts import Manifest
from eagle3_core.errors import StoreError
from eagle3_core.store.local import LocalStore

NUM_FILES = 2
"""Files of a remote store that lie on the local disk at once: the one in use and the next."""

_Opened = tuple[Path, contextlib.ExitStack]


class FilesAhead:
    """Opens files in a known order; use as a context manager.

    Args:
        store: any store.
        manifest: of the artifact.
        names: of its files, in the order in which they will be asked for.
    """

    def __init__(self, store: LocalStore, manifest: Manifest, names: Sequence[str]) -> None:
        self._store, self._manifest = store, manifest
        self._following = dict(pairwise(names))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="file-ahead")
        self._begun: dict[str, Future[_Opened]] = {}

    def __enter__(self) -> FilesAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for begun in self._begun.values():
            if not begun.cancel():
                with contextlib.suppress(StoreError):
                    begun.result()[1].close()
        self._pool.shutdown()

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """One file for as long as the block lasts, as `LocalStore.shard_file`.

        Raises:
            StoreError: as `LocalStore.shard_file`, of this file alone.
        """
        self._begin(name)
        opened = self._begun.pop(name)
        following = self._following.get(name)
        try:
            path, stack = opened.result()
        finally:
            if following is not None:
                self._begin(following)
        with stack:
            yield path

    def _begin(self, name: str) -> None:
        if name not in self._begun:
            self._begun[name] = self._pool.submit(self._open, name)

    def _open(self, name: str) -> _Opened:
        stack = contextlib.ExitStack()
        return stack.enter_context(self._store.shard_file(self._manifest, name)), stack
