"""Which artifacts may go: pure decisions, made from manifests alone.

A policy names artifacts; several policies name what any of them names. What is named goes unless something
keeps it:

    a run in progress uses it
    `keep` lists it, or what was made from it
    it is what something that stays was made from, down to the roots
    no newer proven artifact replaces it

A verification follows its capture. `force` overrides all of that for the artifacts that a person names, and
for nothing else. Replaces: for a capture a newer one, complete and verified as it is now, of the same target
and dataset content or of the same profile; for anything else a newer complete one of the same profile (an
export of which a benchmark was made must be replaced by one of which one was made). A rehearsal on `limit`
prompts replaces only rehearsals.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from eagle3_core.artifacts import ArtifactKind, ArtifactRef, Manifest
from eagle3_core.sections import RetentionConfig

RUN_ID = re.compile(r"^\d{8}-\d{6}-(?P<profile>.+)-[0-9a-f]{4}$")
DATA_KINDS: tuple[ArtifactKind, ...] = ("conversations", "dataset", "vocabulary", "capture", "labels")
"""What checkpoints are made from."""
PRODUCTS: tuple[ArtifactKind, ...] = ("checkpoint", "export", "benchmark")
GOING_ORDER: tuple[ArtifactKind, ...] = (
    "benchmark", "export", "checkpoint", "labels", "capture", "verification", "vocabulary", "dataset",
    "conversations",
)  # fmt: skip
"""What was made from others goes before these, and a verification only after its capture."""
ABANDONED_DAYS = 1.0
BY_FORCE = "named with --force"
UNKNOWN = object()


@dataclass(frozen=True)
class Verdict:
    """What becomes of one artifact, and why.

    Attributes:
        bytes: size of its files.
        goes: whether it is to be moved to the trash.
        named_by: policies that name it; empty if none does.
        kept_because: what keeps it although it is named.
    """

    ref: ArtifactRef
    bytes: int
    created_at: str
    goes: bool
    named_by: tuple[str, ...]
    kept_because: tuple[str, ...]


def decide(
    manifests: Iterable[Manifest],
    policy: RetentionConfig,
    now: datetime,
    in_use: Mapping[ArtifactRef, str],
    forced: Collection[ArtifactRef] = (),
    unreadable: Sequence[str] = (),
    condemned: Collection[ArtifactRef] = (),
) -> list[Verdict]:
    """The fate of every artifact, in the order in which they may go: what was made from others first.

    Args:
        manifests: of all artifacts of the store, partial ones too.
        policy: what to name.
        now: the present, with a time zone.
        in_use: artifacts that a run in progress uses, and how to say so.
        forced: artifacts that a person has named.
        unreadable: artifacts whose manifests cannot be read. What they were made from is not known, so with
            any of them no policy moves anything.
        condemned: captures of which shards were found wrong after all: they replace none.
    """
    shelf = _Shelf(list(manifests), condemned)
    pinned = {ArtifactRef.parse(text) for text in policy.keep}
    guards = {
        manifest.ref: [
            *([in_use[manifest.ref]] if manifest.ref in in_use else []),
            *(["it is listed to be kept"] if manifest.ref in pinned else []),
            *([f"the manifest of {unreadable[0]} cannot be read"] if unreadable else []),
            *shelf.not_replaced(manifest),
        ]
        for manifest in shelf.manifests
    }
    choice = _Choice(shelf, guards, frozenset(forced))
    choice.name(_old(shelf, policy, now))
    choice.name(_beyond_the_last(shelf, policy))
    if policy.unreferenced:
        choice.name(_unreferenced(shelf, choice.going()))
    if policy.max_bytes is not None:
        choice.name_oldest_over(int(policy.max_bytes))
    return choice.verdicts()


def decide_abandoned(
    ref: ArtifactRef,
    size: int,
    changed_at: datetime,
    policy: RetentionConfig,
    now: datetime,
    in_use: Mapping[ArtifactRef, str],
    forced: Collection[ArtifactRef] = (),
) -> Verdict:
    """The fate of files without a manifest: a writer was killed before it had finished the first of them.

    They go by age or as unreferenced, but not before a day has passed.
    """
    days = max(ABANDONED_DAYS, policy.older_than_days or 0.0)
    is_asked = policy.unreferenced or policy.older_than_days is not None
    named = [BY_FORCE] if ref in forced else []
    if is_asked and now - changed_at > timedelta(days=days):
        named.append(f"it has no manifest and has not changed for {days:g} days")
    user = in_use.get(ref)
    goes = ref in forced or (bool(named) and user is None)
    kept = (user,) if named and user and not goes else ()
    return Verdict(ref, size, changed_at.isoformat(timespec="seconds"), goes, tuple(named), kept)


def ancestors(manifests: Iterable[Manifest], refs: Iterable[ArtifactRef]) -> dict[ArtifactRef, ArtifactRef]:
    """What `refs` were made from, down to the roots, each with one of `refs` that needs it."""
    by_ref = {manifest.ref: manifest for manifest in manifests}
    found: dict[ArtifactRef, ArtifactRef] = {}
    for source in refs:
        todo = [source]
        while todo:
            manifest = by_ref.get(todo.pop())
            for parent in manifest.parents.values() if manifest else ():
                if parent not in found:
                    found[parent] = source
                    todo.append(parent)
    return found


def profile_of(manifest: Manifest) -> str | None:
    """Name of the profile whose run made an artifact, or None."""
    match = RUN_ID.match(manifest.provenance.run_id or "")
    return match["profile"] if match else None


def created(manifest: Manifest) -> datetime:
    """When an artifact was last written to."""
    moment = datetime.fromisoformat(manifest.provenance.created_at)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class _Shelf:
    """The store's manifests, and what they say of each other."""

    def __init__(self, manifests: list[Manifest], condemned: Collection[ArtifactRef]) -> None:
        self._condemned = condemned
        self.manifests = sorted(
            manifests, key=lambda one: (GOING_ORDER.index(one.ref.kind), created(one), one.ref.id)
        )
        self.by_ref = {manifest.ref: manifest for manifest in manifests}

    def of_kind(self, kind: ArtifactKind) -> list[Manifest]:
        """Oldest first."""
        return [manifest for manifest in self.manifests if manifest.ref.kind == kind]

    def ancestors(self, refs: Iterable[ArtifactRef]) -> dict[ArtifactRef, ArtifactRef]:
        """As the function of that name."""
        return ancestors(self.manifests, refs)

    @cached_property
    def verified(self) -> set[ArtifactRef]:
        """Captures of which a verification of the very same files exists, and none was found wrong later."""
        checked = {
            (one.parents.get("capture"), one.facts.get("capture_content"))
            for one in self.of_kind("verification")
            if one.state == "complete"
        }
        captures = [one for one in self.of_kind("capture") if one.ref not in self._condemned]
        return {one.ref for one in captures if (one.ref, one.content) in checked}

    @cached_property
    def measured(self) -> set[ArtifactRef | None]:
        """Exports of which a benchmark was made."""
        done = [one for one in self.of_kind("benchmark") if one.state == "complete"]
        return {one.parents.get("export") for one in done}

    def limit(self, manifest: Manifest) -> Any:
        """The rehearsal limit of the data behind an artifact: a number, None, or `UNKNOWN`."""
        refs = [manifest.ref, *self.ancestors([manifest.ref])]
        limits = [
            self.by_ref[ref].identity.get("limit")
            for ref in refs
            if ref.kind == "conversations" and ref in self.by_ref
        ]
        return limits[0] if limits else UNKNOWN

    def not_replaced(self, manifest: Manifest) -> list[str]:
        """Why an artifact is the newest of its sort; empty if another one replaces it."""
        kind, profile = manifest.ref.kind, profile_of(manifest)
        if kind == "verification" or any(self._replaces(one, manifest) for one in self.of_kind(kind)):
            return []
        proof = {"capture": ", verified", "export": ", benchmarked"}.get(kind, "")
        of_profile = f" of the profile {profile}" if profile else ""
        same_data = " or of the same target and dataset" if kind == "capture" else ""
        return [f"no newer{proof} {kind}{of_profile}{same_data} replaces it"]

    def _replaces(self, new: Manifest, old: Manifest) -> bool:
        if new.state != "complete" or created(new) <= created(old):
            return False
        if new.ref.kind == "capture" and new.ref not in self.verified:
            return False
        if new.ref.kind == "export" and old.ref in self.measured and new.ref not in self.measured:
            return False
        if new.ref.kind == "capture" and _same_data(new, old):
            return True
        limit = self.limit(new)
        fits = limit is None or (limit is not UNKNOWN and limit == self.limit(old))
        return fits and profile_of(new) is not None and profile_of(new) == profile_of(old)


class _Choice:
    """What is named so far, and what would go."""

    def __init__(
        self, shelf: _Shelf, guards: Mapping[ArtifactRef, list[str]], forced: frozenset[ArtifactRef]
    ) -> None:
        self._shelf, self._guards, self._forced = shelf, guards, forced
        self._named: dict[ArtifactRef, list[str]] = {ref: [BY_FORCE] for ref in forced if ref in guards}

    def name(self, found: Mapping[ArtifactRef, str]) -> None:
        """Add what a policy names."""
        for ref, why in found.items():
            self._named.setdefault(ref, []).append(why)

    def going(self) -> set[ArtifactRef]:
        """Named, and nothing keeps it."""
        goes = {ref for ref in self._named if ref in self._forced or not self._guards[ref]}
        goes -= self._needed(goes).keys() - self._forced
        for one in self._shelf.of_kind("verification"):
            capture = one.parents.get("capture")
            if capture in self._shelf.by_ref and one.ref not in self._forced:
                follows = capture in goes and (capture in self._forced or not self._guards[one.ref])
                goes = goes | {one.ref} if follows else goes - {one.ref}
        return goes

    def name_oldest_over(self, limit: int) -> None:
        """Name captures that nothing keeps, oldest first, until the rest is no larger than `limit`."""
        goes = self.going()
        left = sum(one.bytes for one in self._shelf.manifests if one.ref not in goes)
        needed = self._needed(goes)
        for capture in sorted(self._shelf.of_kind("capture"), key=created):
            if left <= limit:
                return
            if capture.ref in goes:
                continue
            self.name({capture.ref: f"the store holds more than {limit:,} bytes"})
            if capture.ref not in needed and not self._guards[capture.ref]:
                left -= capture.bytes

    def verdicts(self) -> list[Verdict]:
        """The outcome for every artifact."""
        goes = self.going()
        needed = self._needed(goes)
        return [
            Verdict(
                ref=one.ref,
                bytes=one.bytes,
                created_at=one.provenance.created_at,
                goes=one.ref in goes,
                named_by=tuple(self._names(one, goes)),
                kept_because=() if one.ref in goes else tuple(self._reasons(one.ref, needed)),
            )
            for one in self._shelf.manifests
        ]

    def _needed(self, goes: Collection[ArtifactRef]) -> dict[ArtifactRef, ArtifactRef]:
        """What stays because something that stays was made from it; a verification needs nothing."""
        stays = [
            one.ref for one in self._shelf.manifests if one.ref not in goes and one.ref.kind != "verification"
        ]
        return self._shelf.ancestors(stays)

    def _names(self, one: Manifest, goes: Collection[ArtifactRef]) -> list[str]:
        follows = one.ref in goes and one.ref not in self._named
        return [f"it verifies {one.parents['capture']}"] if follows else self._named.get(one.ref, [])

    def _reasons(self, ref: ArtifactRef, needed: Mapping[ArtifactRef, ArtifactRef]) -> list[str]:
        if ref not in self._named:
            return []
        reasons = list(self._guards[ref])
        if ref in needed:
            reasons.append(f"{needed[ref]} was made from it and stays")
        if not reasons:
            reasons.append("the capture that it verifies stays")
        return reasons


def _same_data(new: Manifest, old: Manifest) -> bool:
    keys = ("target", "content")
    return all(key in old.identity and old.identity[key] == new.identity.get(key) for key in keys)


def _old(shelf: _Shelf, policy: RetentionConfig, now: datetime) -> dict[ArtifactRef, str]:
    if policy.older_than_days is None:
        return {}
    before = now - timedelta(days=policy.older_than_days)
    why = f"older than {policy.older_than_days:g} days"
    return {one.ref: why for one in shelf.manifests if created(one) < before}


def _beyond_the_last(shelf: _Shelf, policy: RetentionConfig) -> dict[ArtifactRef, str]:
    """Captures older than the n newest complete ones of their target; partial ones are not counted."""
    if policy.keep_last_captures is None:
        return {}
    named: dict[ArtifactRef, str] = {}
    counts: dict[Any, int] = {}
    for one in sorted(shelf.of_kind("capture"), key=created, reverse=True):
        target = one.identity.get("target")
        if counts.get(target, 0) >= policy.keep_last_captures:
            named[one.ref] = f"not one of the last {policy.keep_last_captures} captures of its target"
        counts[target] = counts.get(target, 0) + (one.state == "complete")
    return named


def _unreferenced(shelf: _Shelf, goes: Collection[ArtifactRef]) -> dict[ArtifactRef, str]:
    products = [one.ref for one in shelf.manifests if one.ref.kind in PRODUCTS and one.ref not in goes]
    referenced = shelf.ancestors(products)
    named = {
        one.ref: "no kept checkpoint was made from it"
        for one in shelf.manifests
        if one.ref.kind in DATA_KINDS and one.ref not in referenced
    }
    return named | {
        one.ref: "the capture that it verifies is gone"
        for one in shelf.of_kind("verification")
        if one.parents.get("capture") not in shelf.by_ref
    }
