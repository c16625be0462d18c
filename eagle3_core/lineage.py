"""What made an artifact: a graph from it back to the prompt files and the target.

    prompts ---+
               +--> conversations --> dataset --> vocabulary --+
    target  ---+                         |                     +--> checkpoint --> export --> benchmark
       +------------------------------> capture ---------------+

(Labels, made from capture and vocabulary too, stand between these and the checkpoint.)

Everything is read from manifests, so a lineage outlives the runs that made it. An ancestor that was deleted
is in the graph as `missing`, or `in trash` where it can still be restored; of a missing one nothing but its
name is known, so the graph ends there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ARTIFACT_KINDS, ID_LENGTH, ArtifactRef, Manifest
from eagle3_core.errors import StoreError
from eagle3_core.host.run_folder import CONFIG_NAME
from eagle3_core.store.local import LocalStore
from eagle3_core.store.trash import TrashEntry

NodeState = Literal["complete", "partial", "in trash", "missing", "unreadable", "outside"]
SourceKind = Literal["prompts", "target"]
SOURCE_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)
ID_SHOWN = 16
MAX_LISTED = 8


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Part):
    """Something outside the store that an artifact was made from: a prompt file or the target."""

    kind: SourceKind
    name: str | None = Field(description="As the profile named it; None where the manifest does not say.")
    hash: str = Field(description="Of the prompt file's content, or the target's fingerprint.")
    facts: dict[str, Any] = Field(default={}, description="Of the target: revision, dtype, quantisation.")

    @property
    def id(self) -> str:
        """Its name in the graph."""
        return f"{self.kind}/{self.hash[:ID_SHOWN]}"


class Making(_Part):
    """Who made an artifact, when, and with what."""

    created_at: str
    host: str
    run_id: str | None
    run_config: str | None = Field(description="The run's resolved configuration, where it still exists.")
    git_commit: str | None = Field(description="Code version; `+changes` if tracked files differed from it.")
    python: str
    packages: dict[str, str]
    seconds: float | None = Field(description="Time it took, in all attempts.")


class LineageNode(_Part):
    """One artifact, prompt file or target."""

    id: str = Field(description="`KIND/ID`; of a source `prompts/HASH` or `target/FINGERPRINT`.")
    kind: str
    state: NodeState = Field(description="Of a source `outside`.")
    name: str | None = Field(default=None, description="Of a source: its name in the profile.")
    hash: str | None = Field(
        default=None, description="Of a source its hash; of an artifact one over all its files."
    )
    num_files: int = 0
    bytes: int = 0
    identity: dict[str, Any] = Field(default={}, description="The settings and inputs that determined it.")
    making: Making | None = None
    problem: str | None = Field(default=None, description="Why its manifest cannot be read.")


class LineageEdge(_Part):
    """`child` was made from `parent`, which had this role."""

    parent: str
    child: str
    role: str


class Lineage(_Part):
    """One artifact with everything that it was made from."""

    format_version: Literal[1] = 1
    artifact: str
    store: str
    nodes: tuple[LineageNode, ...] = Field(description="Ancestors before what was made from them.")
    edges: tuple[LineageEdge, ...]

    def node(self, name: str) -> LineageNode:
        """The node of that id."""
        return next(node for node in self.nodes if node.id == name)

    def parents(self, name: str) -> dict[str, LineageNode]:
        """What a node was made from, by role."""
        return {edge.role: self.node(edge.parent) for edge in self.edges if edge.child == name}

    @property
    def missing(self) -> list[str]:
        """Ancestors whose manifest is gone or unreadable: what they were made from is not known."""
        return [node.id for node in self.nodes if node.state in ("missing", "unreadable")]


def find_artifact(store: LocalStore, text: str) -> ArtifactRef:
    """The artifact that `kind/id` names, or an id alone; of an id its beginning is enough.

    Raises:
        StoreError: none or several.
    """
    if text.rpartition("/")[0] in SOURCE_KINDS:
        raise _names_a_source(store, text)
    if not _is_whole(text):
        return _only_match(store, store.refs(), text)
    ref = ArtifactRef.parse(text)
    if store.find(ref) is None:
        _refuse_what_is_in_the_trash(store, text)
        raise StoreError(f"{ref} is not in {store.place}", remedy="set --store or --workspace")
    return ref


def find_remains(store: LocalStore, text: str) -> ArtifactRef:
    """As `find_artifact`, also of what has no manifest that can be read; a whole `kind/id` need not be there.

    Raises:
        StoreError: none or several begin so.
    """
    if _is_whole(text):
        return ArtifactRef.parse(text)
    return _only_match(store, (*store.refs(), *store.without_manifest()), text)


def _is_whole(text: str) -> bool:
    """Whether a text must be a whole `kind/id`, because no beginning is so long or no kind has that name."""
    kind, separator, beginning = text.rpartition("/")
    return bool(separator) and (kind not in ARTIFACT_KINDS or len(beginning) >= ID_LENGTH)


def _only_match(store: LocalStore, refs: Iterable[ArtifactRef], text: str) -> ArtifactRef:
    matches = [ref for ref in refs if ref.is_named(text)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        _refuse_what_is_in_the_trash(store, text)
    found = ", ".join(str(ref) for ref in matches[:5])
    raise StoreError(
        f"{len(matches)} artifacts in {store.place} begin with {text!r}: {found}"
        if matches
        else f"no artifact in {store.place} begins with {text!r}",
        remedy="`eagle3 gc --dry-run` lists those that are there",
    )


def _refuse_what_is_in_the_trash(store: LocalStore, text: str) -> None:
    found = {entry.ref for entry in store.trash().entries() if entry.ref.is_named(text)}
    if len(found) == 1:
        ref = found.pop()
        raise StoreError(
            f"{ref} is in the trash of {store.place}", remedy=f"`eagle3 gc --restore {ref}` puts it back"
        )


def _names_a_source(store: LocalStore, text: str) -> StoreError:
    """Says of a prompt file's or target's id that it is no artifact, and names its children."""
    made = []
    for ref in store.refs():
        with contextlib.suppress(StoreError):  # one whose manifest cannot be read says nothing of its sources
            manifest = store.find(ref)
            if manifest and any(one.id.startswith(text) for one in sources(manifest).values()):
                made.append(str(ref))
    what = "the fingerprint of a target" if text.startswith("target") else "the hash of a prompt file"
    listed = ", ".join(made[:MAX_LISTED]) or "nothing"
    more = f" and {len(made) - MAX_LISTED} more" if len(made) > MAX_LISTED else ""
    return StoreError(
        f"{text} is {what}, which is no artifact of {store.place}; made from it directly: {listed}{more}",
        remedy="ask for the lineage of what was made from it: it ends there",
    )


def trace(store: LocalStore, ref: ArtifactRef, workspace: Path | None = None) -> Lineage:
    """The artifact with all its ancestors.

    Args:
        store: where the manifests are.
        ref: the artifact.
        workspace: where run folders may still lie.
    """
    tracer = _Tracer(store, workspace)
    tracer.visit(ref)
    return Lineage(
        artifact=str(ref),
        store=store.place,
        nodes=tuple(tracer.nodes.values()),
        edges=tuple(tracer.edges),
    )


def sources(manifest: Manifest) -> dict[str, Source]:
    """What an artifact was made from that lies in no store, by role."""
    found: dict[str, Source] = {}
    identity, facts = manifest.identity, manifest.facts
    names = {file["sha256"]: file["name"] for file in facts.get("prompt_files", ())}
    for number, digest in enumerate(identity.get("prompts", ())):
        role = "prompts" if number == 0 else f"prompts {number + 1}"
        found[role] = Source(kind="prompts", name=names.get(digest), hash=digest)
    if isinstance(identity.get("target"), str):
        about = {key: identity[key] for key in ("revision", "dtype", "quantization") if identity.get(key)}
        found["target"] = Source(
            kind="target", name=facts.get("target_model"), hash=identity["target"], facts=about
        )
    return found


class _Tracer:
    """Walks from an artifact to its roots; each node once."""

    def __init__(self, store: LocalStore, workspace: Path | None) -> None:
        self._store, self._workspace = store, workspace
        self._visited: set[ArtifactRef] = set()
        self.nodes: dict[str, LineageNode] = {}
        self.edges: list[LineageEdge] = []

    @cached_property
    def _trash(self) -> dict[ArtifactRef, TrashEntry]:
        """Looked at only where something is missing."""
        return {entry.ref: entry for entry in self._store.trash().entries()}

    def visit(self, ref: ArtifactRef) -> None:
        if ref in self._visited:
            return
        self._visited.add(ref)
        manifest, state, problem = self._manifest(ref)
        if manifest is None:
            self.nodes[str(ref)] = LineageNode(id=str(ref), kind=ref.kind, state=state, problem=problem)
            return
        for role, source in sources(manifest).items():
            self._add_source(source)
            self.edges.append(LineageEdge(parent=source.id, child=str(ref), role=role))
        for role, parent in sorted(manifest.parents.items()):
            self.visit(parent)
            self.edges.append(LineageEdge(parent=str(parent), child=str(ref), role=role))
        self.nodes[str(ref)] = self._node(manifest, state)

    def _manifest(self, ref: ArtifactRef) -> tuple[Manifest | None, NodeState, str | None]:
        try:
            manifest = self._store.find(ref)
        except StoreError as error:
            return None, "unreadable", str(error)
        if manifest is not None:
            return manifest, manifest.state, None
        if ref in self._trash:
            try:
                return self._store.trash().manifest(self._trash[ref]), "in trash", None
            except StoreError as error:
                return None, "unreadable", str(error)
        return None, "missing", None

    def _add_source(self, source: Source) -> None:
        """Of one that two artifacts share it is known what either of them says."""
        known = self.nodes.get(source.id)
        self.nodes[source.id] = LineageNode(
            id=source.id,
            kind=source.kind,
            state="outside",
            name=source.name or (known.name if known else None),
            hash=source.hash,
            identity=(known.identity if known else {}) | source.facts,
        )

    def _node(self, manifest: Manifest, state: NodeState) -> LineageNode:
        return LineageNode(
            id=str(manifest.ref),
            kind=manifest.ref.kind,
            state=state,
            hash=manifest.content,
            num_files=len(manifest.files),
            bytes=manifest.bytes,
            identity={key: value for key, value in manifest.identity.items() if key != "made_from"},
            making=self._making(manifest),
        )

    def _making(self, manifest: Manifest) -> Making:
        made = manifest.provenance
        config = (
            self._workspace / "runs" / made.run_id / CONFIG_NAME if self._workspace and made.run_id else None
        )
        return Making(
            created_at=made.created_at,
            host=made.host,
            run_id=made.run_id,
            run_config=str(config) if config and config.is_file() else None,
            git_commit=made.git_commit,
            python=made.python,
            packages=made.packages,
            seconds=made.seconds,
        )


def to_dot(lineage: Lineage) -> str:
    """The graph for Graphviz (`dot -Tsvg`); the same text for the same lineage."""
    lines = ["digraph lineage {", "  rankdir=LR;", '  node [shape=box, fontname="sans-serif"];']
    for node in sorted(lineage.nodes, key=lambda node: node.id):
        style = {"outside": ", style=rounded", "complete": ""}.get(node.state, ", style=dashed")
        lines.append(f"  {_quoted(node.id)} [label={_quoted(_label(node))}{style}];")
    for edge in sorted(lineage.edges, key=lambda edge: (edge.parent, edge.child, edge.role)):
        lines.append(f"  {_quoted(edge.parent)} -> {_quoted(edge.child)} [label={_quoted(edge.role)}];")
    return "\n".join([*lines, "}", ""])


def _label(node: LineageNode) -> str:
    parts = [node.id]
    if node.name:
        parts.append(node.name)
    if node.state not in ("complete", "outside"):
        parts.append(node.state)
    if node.making:
        parts += [f"{node.num_files} files, {node.bytes:,} bytes", node.making.created_at]
    return "\n".join(parts)


def _quoted(text: str) -> str:
    """A quoted string of the DOT language."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
