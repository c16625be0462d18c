"""Collects garbage: decides, moves to the trash, restores and purges, and says what was done and why."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactRef, Manifest
from eagle3_core.errors import StoreError
from eagle3_core.sections import RetentionConfig
from eagle3_core.store.condemned import condemned
from eagle3_core.store.local import LocalStore
from eagle3_core.store.retention import BY_FORCE, Verdict, ancestors, decide, decide_abandoned
from eagle3_core.store.trash import Trash, TrashEntry, expired
from eagle3_core.store.uses import current_uses, used_artifacts

ELSEWHERE = ("another process has moved it",)
Action = Literal["to trash", "kept", "purged", "in trash", "restored"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GcLine(_Part):
    """What became of one artifact, and why."""

    artifact: str = Field(description="`KIND/ID`.")
    bytes: int
    created_at: str = Field(description="When it was made; of one in the trash when it was moved there.")
    action: Action
    reasons: tuple[str, ...] = Field(description="What named it, or why it stays.")
    named: bool = Field(description="Whether a policy or a person named it.")


class GcReport(_Part):
    """One garbage collection."""

    store: str
    dry_run: bool = Field(description="Nothing was changed: the actions are those that would be taken.")
    lines: tuple[GcLine, ...]
    trashed_bytes: int = Field(description="Moved to the trash; they take space until they are purged.")
    purged_bytes: int = Field(description="Removed for good.")
    kept_bytes: int
    warnings: tuple[str, ...] = ()


def collect_garbage(
    store: LocalStore,
    policy: RetentionConfig,
    *,
    forced: Collection[ArtifactRef] = (),
    purge_after_days: float | None = None,
    dry_run: bool = False,
    also_in_use: Mapping[ArtifactRef, str] | None = None,
    now: datetime | None = None,
) -> GcReport:
    """Move to the trash what a policy or a person names and nothing keeps; purge what lies there for long.

    Args:
        store: where to collect.
        policy: what to name.
        forced: artifacts that go whatever would keep them, unless somebody writes them this moment.
        purge_after_days: remove for good what lies in the trash for longer, 0 all; None removes nothing.
        dry_run: change nothing, say what would be done.
        also_in_use: artifacts used by runs that left no note in the store, and how to say so.
        now: the present; for tests.

    Raises:
        StoreError: a forced artifact is not in the store or being written, or the store cannot be changed.
    """
    now, trash = now or datetime.now(UTC), store.trash()
    manifests, unreadable = read_manifests(store)
    abandoned = store.without_manifest()
    known = {manifest.ref for manifest in manifests} | {ref for ref, _ in unreadable} | abandoned.keys()
    missing = [str(ref) for ref in forced if ref not in known]
    if missing:
        raise StoreError(f"{', '.join(missing)} is not in {store.place}", remedy="`eagle3 gc` lists what is")
    in_use = dict(also_in_use or {}) | used_artifacts(current_uses(store))
    wrong = {one.ref for one in manifests if one.ref.kind == "capture" and condemned(store, one)}
    verdicts = decide(manifests, policy, now, in_use, forced, [str(ref) for ref, _ in unreadable], wrong)
    verdicts += [_unreadable_verdict(ref, why, forced) for ref, why in unreadable]
    verdicts += [
        decide_abandoned(ref, size, changed, policy, now, in_use, forced)
        for ref, (size, changed) in abandoned.items()
    ]
    if not dry_run:
        trash.finish()
    present = trash.entries()
    old = expired(present, now, purge_after_days) if purge_after_days is not None else []
    lines = []
    for entry in present:  # before anything is moved: on a full disk even that may need a little space
        is_due = entry in old and entry.ref not in in_use
        lines.append(_purge(trash, entry, dry_run) if is_due else _trash_line(entry, "in trash"))
    lines += _carry_out(store, manifests, verdicts, forced, dry_run)
    return _report(store, lines, dry_run, policy, [why for _, why in unreadable])


def _carry_out(
    store: LocalStore,
    manifests: Sequence[Manifest],
    verdicts: Sequence[Verdict],
    forced: Collection[ArtifactRef],
    dry_run: bool,
) -> list[GcLine]:
    """Move what is to go; where something cannot be moved, what it was made from stays with it."""
    lines: list[GcLine] = []
    stuck: dict[ArtifactRef, str] = {}
    verified = {one.ref: one.parents.get("capture") for one in manifests if one.ref.kind == "verification"}
    for verdict in verdicts:
        why = stuck.get(verdict.ref)
        if verified.get(verdict.ref) in stuck:
            why = "the capture that it verifies stays"
        lines.append(_line(store, store.trash(), verdict, forced, dry_run, why))
        if verdict.goes and lines[-1].action == "kept" and verdict.ref not in verified:
            stuck.setdefault(verdict.ref, "it could not be moved")
            for ref in ancestors(manifests, [verdict.ref]):
                stuck.setdefault(ref, f"{verdict.ref} was made from it and stays")
    return lines


def restore(store: LocalStore, entry: TrashEntry) -> GcReport:
    """Put one artifact back, and with a capture the verifications that went with it.

    Raises:
        StoreError: it has been made again meanwhile.
    """
    trash = store.trash()
    trash.restore(entry)
    lines = [_trash_line(entry, "restored")]
    for follower in _verifications_of(trash, entry.ref) if entry.ref.kind == "capture" else ():
        with contextlib.suppress(StoreError):  # made again meanwhile: that one stays
            trash.restore(follower)
            lines.append(_trash_line(follower, "restored"))
    return _report(store, lines, False, RetentionConfig(), [])


def _verifications_of(trash: Trash, capture: ArtifactRef) -> list[TrashEntry]:
    """Those in the trash that verify a capture: of each the one that was moved last."""
    newest = {entry.ref: entry for entry in trash.entries() if entry.ref.kind == "verification"}
    found = []
    for entry in newest.values():
        with contextlib.suppress(StoreError):  # an unreadable one verifies nothing
            if trash.manifest(entry).parents.get("capture") == capture:
                found.append(entry)
    return found


def read_manifests(store: LocalStore) -> tuple[list[Manifest], list[tuple[ArtifactRef, str]]]:
    """All manifests, and the artifacts whose manifest cannot be read, with why."""
    manifests, unreadable = [], []
    for ref in store.refs():
        try:
            manifest = store.find(ref)
        except StoreError as error:
            unreadable.append((ref, str(error)))
            continue
        if manifest is not None:
            manifests.append(manifest)
    return manifests, unreadable


def _unreadable_verdict(ref: ArtifactRef, why: str, forced: Collection[ArtifactRef]) -> Verdict:
    goes = ref in forced
    return Verdict(ref, 0, "unknown", goes, (BY_FORCE,) if goes else (), () if goes else (why,))


def _line(
    store: LocalStore,
    trash: Trash,
    verdict: Verdict,
    forced: Collection[ArtifactRef],
    dry_run: bool,
    why_stuck: str | None,
) -> GcLine:
    """Carry out one verdict, unless something that was to go could not and was made from it."""
    kept = verdict.kept_because or (() if verdict.goes else ("no policy names it",))
    if verdict.goes and why_stuck is not None and verdict.ref not in forced:
        kept = (why_stuck,)
    elif verdict.goes and not dry_run:
        kept = _move(store, trash, verdict, forced)
    return GcLine(
        artifact=str(verdict.ref),
        bytes=verdict.bytes,
        created_at=verdict.created_at,
        action="in trash" if kept == ELSEWHERE else "to trash" if verdict.goes and not kept else "kept",
        reasons=kept or verdict.named_by,
        named=bool(verdict.named_by),
    )


def _move(
    store: LocalStore, trash: Trash, verdict: Verdict, forced: Collection[ArtifactRef]
) -> tuple[str, ...]:
    """Move an artifact to the trash; why it stays nevertheless, or nothing."""
    is_forced = verdict.ref in forced
    try:
        entry = trash.put(verdict.ref, verdict.bytes)
    except StoreError as error:  # held by somebody, or not movable: the others may go all the same
        if is_forced:
            raise
        return (str(error),)
    if entry is None:
        return ELSEWHERE
    user = None if is_forced else used_artifacts(current_uses(store)).get(verdict.ref)
    if user is None:
        return ()
    # A run came in between: it finds the artifact where it was, or makes it again.
    with contextlib.suppress(StoreError):
        trash.restore(entry)
    return (user,)


def _purge(trash: Trash, entry: TrashEntry, dry_run: bool) -> GcLine:
    """Remove one artifact for good; one that cannot go now, as when somebody makes it again, waits."""
    try:
        if not dry_run:
            trash.purge(entry)
    except StoreError as error:
        line = _trash_line(entry, "in trash")
        return line.model_copy(update={"reasons": (*line.reasons, str(error))})
    return _trash_line(entry, "purged")


def _trash_line(entry: TrashEntry, action: Action) -> GcLine:
    moved = entry.moved_at.isoformat(timespec="seconds")
    reason = f"in the trash since {moved}"
    return GcLine(
        artifact=str(entry.ref),
        bytes=entry.bytes,
        created_at=moved,
        action=action,
        reasons=(reason,),
        named=False,
    )


def _report(
    store: LocalStore, lines: Sequence[GcLine], dry_run: bool, policy: RetentionConfig, warnings: list[str]
) -> GcReport:
    sums = {
        action: sum(line.bytes for line in lines if line.action == action)
        for action in ("to trash", "kept", "purged")
    }
    if policy.max_bytes is not None and sums["kept"] > policy.max_bytes:
        warnings = [
            *warnings,
            f"{sums['kept']:,} bytes stay, more than the {int(policy.max_bytes):,} allowed: the lines above "
            "say what keeps them; a person can name one with --force",
        ]
    return GcReport(
        store=store.place,
        dry_run=dry_run,
        lines=tuple(lines),
        trashed_bytes=sums["to trash"],
        purged_bytes=sums["purged"],
        kept_bytes=sums["kept"],
        warnings=tuple(warnings),
    )
