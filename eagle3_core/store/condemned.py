"""Files that were found wrong, whatever their hash says: the stage that makes them makes them anew.

The record lies beside the artifacts and names each file with the hash of the content that was found wrong, so
it holds for that content alone. It goes when the same content was made anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, TypeAdapter, ValidationError

from eagle3_core.artifacts import ArtifactRef, Manifest
from eagle3_core.errors import StoreError

if TYPE_CHECKING:
    from eagle3_core.store.local import LocalStore

PLACE = "condemned"


class Fault(BaseModel):
    """What was found of one file."""

    content: str
    reason: str


RECORD = TypeAdapter(dict[str, Fault])


def condemn(store: LocalStore, manifest: Manifest, reasons: Mapping[str, str]) -> None:
    """Have files of a complete artifact made anew; of a file that is condemned already the reason stays.

    Args:
        store: where it lies.
        manifest: of the artifact.
        reasons: why, by the path of each file.
    """
    if not reasons:
        return
    record, known = _read(store, manifest.ref), condemned(store, manifest)
    for path, reason in reasons.items():
        entry = manifest.file(path)
        if entry is not None and path not in known:
            record[path] = Fault(content=entry.xxh3_128, reason=" ".join(reason.split()))
    store.notes(PLACE).write(_name(manifest.ref), RECORD.dump_json(record, indent=1).decode())


def condemned(store: LocalStore, manifest: Manifest) -> dict[str, str]:
    """Path and reason of the files of a manifest that are to be made anew."""
    record = _read(store, manifest.ref)
    contents = {entry.path: entry.xxh3_128 for entry in manifest.files}
    return {
        path: f"{path} is to be made anew: {found.reason}"
        for path, found in record.items()
        if contents.get(path) == found.content
    }


def pardon(store: LocalStore, manifest: Manifest) -> None:
    """Forget what was wrong with the files of a complete artifact: all of it has been made anew.

    What is known of other contents stays: they may lie in the trash, and come back from there.
    """
    record, contents = _read(store, manifest.ref), {one.path: one.xxh3_128 for one in manifest.files}
    others = {path: found for path, found in record.items() if contents.get(path) != found.content}
    if others:
        store.notes(PLACE).write(_name(manifest.ref), RECORD.dump_json(others, indent=1).decode())
    else:
        store.notes(PLACE).remove(_name(manifest.ref))


def _name(ref: ArtifactRef) -> str:
    return f"{ref.kind}-{ref.id}.json"


def _read(store: LocalStore, ref: ArtifactRef) -> dict[str, Fault]:
    text = store.notes(PLACE).read(_name(ref))
    try:
        return RECORD.validate_json(text or "{}")
    except ValidationError as error:
        raise StoreError(
            f"the note {PLACE}/{_name(ref)} in {store.place} cannot be read",
            remedy=f"remove it and check what it was about with `eagle3 verify {ref}`",
        ) from error
