"""What interrupted writers left behind: found and removed only where nobody writes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from eagle3_core.errors import StoreError
from eagle3_core.store.files import TEMPORARY_PREFIX, folder_lock, remove_temporary_files


def remove_leftovers(folders: Iterable[Path]) -> tuple[dict[str, int], list[str]]:
    """Remove temporary files of artifact folders that no process holds.

    Files that a manifest names are never temporary, so nothing that is referenced can be removed.

    Returns:
        Path and bytes of each removed file, and the folders that another process holds.
    """
    removed: dict[str, int] = {}
    busy: list[str] = []
    for folder in folders:
        found = leftovers(folder)
        if not found:
            continue
        try:
            with folder_lock(folder, wait_seconds=0.0):
                remove_temporary_files(folder)
        except StoreError:
            busy.append(str(folder))
            continue
        removed |= found
    return removed, busy


def leftovers(folder: Path) -> dict[str, int]:
    """Temporary files in a folder: path and bytes."""
    if not folder.is_dir():
        return {}
    return {str(path): path.stat().st_size for path in sorted(folder.rglob(f"{TEMPORARY_PREFIX}*"))}
