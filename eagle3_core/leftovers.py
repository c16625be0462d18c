"""What interrupted writers left behind: found and removed only where nobody writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from eagle3_core.artifacts import ArtifactRef, Manifest
from eagle3_core.capture.shard_queue import Staging
from eagle3_core.errors import StoreError
from eagle3_core.store.condemned import condemned
from eagle3_core.store.files import temporary_files
from eagle3_core.store.local import LocalStore, strangers
from eagle3_core.store.locks import folder_lock
from eagle3_core.store.tree import files_below


def remove_leftovers(store: LocalStore, artifacts: Iterable[ArtifactRef]) -> tuple[dict[str, int], list[str]]:
    """Remove what is left over in the folders of artifacts that no process holds.

    Files that a manifest names are never left over, so nothing that is referenced can be removed.

    Returns:
        Path and bytes of each removed file, and the folders that another process holds.
    """
    removed: dict[str, int] = {}
    busy: list[str] = []
    for ref in artifacts:
        folder = store.folder(ref)
        if not leftovers(store, ref):
            continue
        try:
            with folder_lock(folder, wait_seconds=0.0):
                found = leftovers(store, ref)
                _remove_staging(store, ref)
                for path in found:
                    Path(path).unlink(missing_ok=True)
        except StoreError:
            busy.append(str(folder))
            continue
        removed |= found
    return removed, busy


def leftovers(store: LocalStore, ref: ArtifactRef) -> dict[str, int]:
    """Path and bytes of an artifact's temporary files and, once it is complete, of files it does not name.

    Of a capture also what ended engine sessions have staged, and all that is staged once it is complete. One
    with condemned shards is not: they are made anew.
    """
    folder, manifest, staging = store.folder(ref), _complete(store, ref), Staging(store, ref)
    found = set(temporary_files(folder))
    if manifest is not None:
        found |= {*strangers(folder, manifest), *files_below(staging.path)}
    found |= {path for session in staging.dead_sessions() for path in files_below(session)}
    sizes: dict[str, int] = {}
    for path in sorted(found):
        with contextlib.suppress(FileNotFoundError):  # its writer has just finished it
            sizes[str(path)] = path.stat().st_size
    return sizes


def _remove_staging(store: LocalStore, ref: ArtifactRef) -> None:
    """Remove the folders in which nothing of value is staged."""
    staging = Staging(store, ref)
    if _complete(store, ref) is not None:
        staging.remove()
    staging.remove_dead_sessions()


def _complete(store: LocalStore, ref: ArtifactRef) -> Manifest | None:
    """The manifest of an artifact that nobody need write to any more."""
    manifest = store.find(ref)
    is_whole = manifest is not None and manifest.state == "complete" and not condemned(store, manifest)
    return manifest if is_whole else None
