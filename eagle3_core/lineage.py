"""What made an artifact: its manifests' parents, down to the roots."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactRef, Manifest
from eagle3_core.errors import StoreError
from eagle3_core.store.local import LocalStore


class Lineage(BaseModel):
    """One artifact and, by role, what it was made from."""

    model_config = ConfigDict(frozen=True)
    ref: ArtifactRef
    state: str = Field(description="complete, partial, or `missing` where an ancestor was deleted.")
    identity: dict[str, Any] = Field(default={}, description="What determined it.")
    num_files: int = 0
    bytes: int = 0
    created_at: str | None = None
    host: str | None = None
    run_id: str | None = None
    git_commit: str | None = None
    seconds: float | None = None
    packages: dict[str, str] = {}
    parents: dict[str, Lineage] = {}


def find_artifact(store: LocalStore, text: str) -> ArtifactRef:
    """The artifact that `kind/id`, or the beginning of an id alone, names.

    Raises:
        StoreError: none or several.
    """
    if "/" in text:
        ref = ArtifactRef.parse(text)
        if store.find(ref) is None:
            raise StoreError(f"{ref} is not in {store.root}", remedy="set --store or --workspace")
        return ref
    matches = [manifest.ref for manifest in store.list() if manifest.ref.id.startswith(text)]
    if len(matches) != 1:
        found = ", ".join(str(ref) for ref in matches[:5]) or "none"
        raise StoreError(f"{len(matches)} artifacts in {store.root} begin with {text!r}: {found}")
    return matches[0]


def trace(store: LocalStore, ref: ArtifactRef) -> Lineage:
    """The artifact with all its ancestors.

    Raises:
        StoreError: a manifest cannot be read.
    """
    manifest = store.find(ref)
    if manifest is None:
        return Lineage(ref=ref, state="missing")
    parents = {role: trace(store, parent) for role, parent in manifest.parents.items()}
    return _lineage(manifest, parents)


def _lineage(manifest: Manifest, parents: dict[str, Lineage]) -> Lineage:
    made = manifest.provenance
    return Lineage(
        ref=manifest.ref,
        state=manifest.state,
        identity={key: value for key, value in manifest.identity.items() if key != "made_from"},
        num_files=len(manifest.files),
        bytes=manifest.bytes,
        created_at=made.created_at,
        host=made.host,
        run_id=made.run_id,
        git_commit=made.git_commit,
        seconds=made.seconds,
        packages=made.packages,
        parents=parents,
    )
