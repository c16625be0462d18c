"""Opens the store that a configuration names."""

from __future__ import annotations

from eagle3_core.config import RunConfig
from eagle3_core.store.local import LocalStore


def open_store(config: RunConfig) -> LocalStore:
    """The store of a run."""
    return LocalStore(config.store_path)
