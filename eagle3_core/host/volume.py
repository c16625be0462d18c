"""File systems: which one a path is or will be on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.host.inspect import existing_parent


@dataclass(frozen=True)
class Volume:
    """A file system.

    Attributes:
        key: the same for every path on it, in every container of the host.
        mount: the uppermost folder of it that can be seen from here.
    """

    key: str
    mount: Path


def volume_of(path: Path) -> Volume:
    """The file system that `path`, which need not exist yet, is or will be on."""
    folder = existing_parent(path.absolute()).resolve()
    device = folder.stat().st_dev
    mount = folder
    while mount.parent != mount and mount.parent.stat().st_dev == device:
        mount = mount.parent
    return Volume(f"{device:x}-{os.statvfs(folder).f_fsid:x}", mount)
