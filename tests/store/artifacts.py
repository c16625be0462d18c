"""Small artifacts of every kind, as a run would leave them, without a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from eagle3_core.artifacts import ArtifactKind, ArtifactPlan, ArtifactRef, Manifest
from eagle3_core.store.local import MANIFEST_NAME, LocalStore
from eagle3_core.store.remote import RemoteStore

PROMPTS = "ab" * 16
NOW = datetime(2026, 3, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Chain:
    """What one run made."""

    conversations: ArtifactRef
    dataset: ArtifactRef
    vocabulary: ArtifactRef
    capture: ArtifactRef
    verification: ArtifactRef | None = None
    labels: ArtifactRef | None = None
    checkpoint: ArtifactRef | None = None
    export: ArtifactRef | None = None
    benchmark: ArtifactRef | None = None

    @property
    def refs(self) -> set[ArtifactRef]:
        """All that was made."""
        return {ref for ref in vars(self).values() if ref is not None}


def add(
    store: LocalStore,
    kind: ArtifactKind,
    identity: dict[str, Any],
    parents: dict[str, ArtifactRef] | None = None,
    *,
    age_days: float = 0.0,
    profile: str = "demo",
    complete: bool = True,
    size: int = 10,
    **facts: Any,
) -> Manifest:
    """Write one artifact with a file of `size` bytes, `age_days` before NOW."""
    parents = parents or {}
    made_from = {role: str(ref) for role, ref in parents.items()}
    plan = ArtifactPlan(kind=kind, identity={"made_from": made_from, **identity}, parents=parents)
    made = NOW - timedelta(days=age_days)
    run_id = f"{made:%Y%m%d-%H%M%S}-{profile}-0a1b"
    with store.writer(plan, run_id) as writer:
        path = writer.folder / "content.bin"
        path.write_bytes(bytes([len(str(plan.ref.id)) % 256]) * size)
        if complete:
            manifest = writer.complete([path], **facts)
        else:
            from eagle3_core.store.files import file_entry

            writer.record(file_entry(writer.folder, path))
            found = store.find(plan.ref)
            assert found is not None
            manifest = found
    dated = manifest.provenance.model_copy(update={"created_at": made.isoformat(timespec="seconds")})
    manifest = manifest.model_copy(update={"provenance": dated})
    replace_manifest(store, manifest)
    return manifest


def replace_manifest(store: LocalStore, manifest: Manifest) -> None:
    """Write a changed manifest where the artifact lies."""
    text = manifest.model_dump_json(indent=1)
    if isinstance(store, RemoteStore):
        store.client.put_bytes(f"{manifest.ref}/{MANIFEST_NAME}", text.encode())
    else:
        (store.folder(manifest.ref) / MANIFEST_NAME).write_text(text)


def add_run(
    store: LocalStore,
    name: str,
    *,
    age_days: float,
    profile: str = "demo",
    limit: int | None = None,
    content: str | None = None,
    upto: str = "benchmark",
    size: int = 10,
) -> Chain:
    """What a run makes up to and with `upto`; `name` makes it another than those of other runs."""

    def one(kind: ArtifactKind, parents: dict[str, ArtifactRef], **facts: Any) -> ArtifactRef:
        identity: dict[str, Any] = {"name": name}
        if kind == "conversations":
            identity |= {"limit": limit, "prompts": [PROMPTS], "target": "t", "revision": "main"}
        if kind == "capture":
            identity |= {"target": "t", "content": content or name}
        made = add(
            store, kind, identity, parents, age_days=age_days, profile=profile,
            size=size if kind == "capture" else 10, **facts,
        )  # fmt: skip
        return made.ref

    conversations = one(
        "conversations",
        {},
        prompt_files=[{"name": "prompts.jsonl", "sha256": PROMPTS}],
        target_model="ORG/NAME",
    )
    dataset = one("dataset", {"conversations": conversations})
    vocabulary = one("vocabulary", {"dataset": dataset})
    capture = one("capture", {"dataset": dataset})
    chain = [conversations, dataset, vocabulary, capture]
    order = ["capture", "verification", "checkpoint", "export", "benchmark"]
    wanted = order[: order.index(upto) + 1]
    if "verification" in wanted:
        chain.append(one("verification", {"capture": capture}, capture_content=store.read(capture).content))
    if "checkpoint" in wanted:
        parents = {"capture": capture, "vocabulary": vocabulary}
        chain.append(one("labels", parents))
        chain.append(one("checkpoint", parents | {"labels": chain[-1]}))
    if "export" in wanted:
        chain.append(one("export", {"checkpoint": chain[-1]}))
    if "benchmark" in wanted:
        chain.append(one("benchmark", {"export": chain[-1], "dataset": dataset}))
    return Chain(*chain)
