"""Opens the store that a configuration or a command names."""

from __future__ import annotations

from pathlib import Path

from eagle3_core.config import ObjectRoot, RunConfig, local_root, resolve_path
from eagle3_core.errors import ConfigError
from eagle3_core.sections import ObjectStoreConfig
from eagle3_core.store.local import LocalStore
from eagle3_core.store.remote import RemoteStore


def open_store(config: RunConfig) -> LocalStore:
    """The store of a run."""
    return _open(config.store, config.workspace_path, config.object_store)


def open_root(root: str | None, workspace: str | Path) -> LocalStore:
    """The store at `root`, for commands that know no configuration.

    Args:
        root: a folder or `s3://bucket/prefix`, reached as the environment says (`AWS_ENDPOINT_URL`); None is
            the workspace's own store.
        workspace: folder of the local mirror of a store in `s3://`.

    Raises:
        ConfigError: a URL that names no bucket.
    """
    return _open(root, resolve_path(str(workspace)), ObjectStoreConfig())


def _open(root: str | None, workspace: Path, settings: ObjectStoreConfig) -> LocalStore:
    try:
        folder = local_root(root, workspace)
    except ValueError as error:
        raise ConfigError(f"the store {root} cannot be opened: {error}") from error
    if root is None or "://" not in root:
        return LocalStore(folder)
    return RemoteStore(ObjectRoot.parse(root), folder, settings)
