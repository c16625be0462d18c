"""The typed run configuration: one YAML profile is one run.

The models are frozen and forbid unknown keys. Units are in the field names or the descriptions; the command
line, the Prefect form and the reference page are generated from them.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from eagle3_core.errors import ConfigError
from eagle3_core.overrides import Override, origin_of
from eagle3_core.sections import (
    BenchmarkConfig,
    CaptureConfig,
    DataConfig,
    DraftConfig,
    EngineConfig,
    ExportConfig,
    LimitsConfig,
    ObjectStoreConfig,
    RetentionConfig,
    Section,
    TargetConfig,
    TrainConfig,
    VerifyConfig,
)

Stage = Literal[
    "preflight", "plan", "prepare", "extract", "verify", "train", "export", "benchmark", "cleanup", "report"
]
STAGES: tuple[Stage, ...] = (
    "preflight", "plan", "prepare", "extract", "verify", "train", "export", "benchmark", "cleanup", "report",
)  # fmt: skip

MAX_SHOWN_INPUT = 100
BUCKET_URL = r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(\S*))?"

PROJECT_ROOT = Path(__file__).resolve().parent.parent
"""The checkout. Relative paths in a profile are relative to it, so a run means the same from any folder."""


class RunConfig(Section):
    """A whole run of the pipeline."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$", description="Short name; it starts the run id.")
    target: TargetConfig = Field(description="The model to accelerate.")
    data: DataConfig = Field(default=DataConfig(), description="Conversations.")
    draft: DraftConfig = Field(default=DraftConfig(), description="The draft model.")
    capture: CaptureConfig = Field(default=CaptureConfig(), description="Hidden-state capture.")
    verify: VerifyConfig = Field(default=VerifyConfig(), description="Checks on captured states.")
    train: TrainConfig = Field(default=TrainConfig(), description="Training.")
    export: ExportConfig = Field(default=ExportConfig(), description="Export.")
    benchmark: BenchmarkConfig = Field(default=BenchmarkConfig(), description="Acceptance benchmark.")
    engine: EngineConfig = Field(default=EngineConfig(), description="Engine environment.")
    limits: LimitsConfig = Field(default=LimitsConfig(), description="Host limits and retries.")
    workspace: str = Field(default="workspace", description="Folder of run folders, caches and staging.")
    store: str | None = Field(
        default=None,
        description="Store root for artifacts: a folder or `s3://bucket/prefix`; None is `store` in the "
        "workspace.",
    )
    object_store: ObjectStoreConfig = Field(
        default=ObjectStoreConfig(), description="A store in `s3://`: server, uploads and cache."
    )
    retention: RetentionConfig = Field(
        default=RetentionConfig(), description="What the stage cleanup moves to the store's trash."
    )
    limit: int | None = Field(
        default=None,
        ge=4,
        description="Rehearse the whole path on this many prompts; quality limits then only warn.",
    )

    @model_validator(mode="after")
    def _no_limit_on_a_capture(self) -> RunConfig:
        if self.limit is not None and self.data.capture is not None:
            raise ValueError("limit takes fewer prompts, and data.capture takes none: leave one of them out")
        return self

    @property
    def workspace_path(self) -> Path:
        """The workspace as an absolute path."""
        return resolve_path(self.workspace)

    @field_validator("store")
    @classmethod
    def _readable_store(cls, store: str | None) -> str | None:
        if store is not None and ("://" in store or not store.strip()):
            local_root(store, Path())
        return store

    @property
    def object_root(self) -> ObjectRoot | None:
        """Bucket and prefix of a store in `s3://`, None where the store is a folder."""
        return ObjectRoot.parse(self.store) if self.store and "://" in self.store else None

    @property
    def store_path(self) -> Path:
        """The local root of the store as an absolute path: of one in `s3://` its local mirror."""
        return local_root(self.store, self.workspace_path)


@dataclass(frozen=True)
class ObjectRoot:
    """A store root in an object store; written `s3://bucket/prefix`."""

    bucket: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> ObjectRoot:
        """Read `s3://bucket/prefix`.

        Raises:
            ValueError: not of that form.
        """
        match = re.fullmatch(BUCKET_URL, url)
        prefix = match[2].strip("/") if match and match[2] else ""
        if match is None or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
            raise ValueError("a store is a folder or s3://BUCKET/PREFIX, a bucket named as S3 allows it")
        return cls(match[1], prefix)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    def key(self, path: str) -> str:
        """The key of an object whose path below the root is `path`."""
        return f"{self.prefix}/{path}" if self.prefix else path


def local_root(store: str | None, workspace: Path) -> Path:
    """The folder of a store: itself, `store` in the workspace, or the mirror of one in `s3://`.

    Raises:
        ValueError: the name is empty, or a URL that names no bucket.
    """
    if store is None:
        return workspace / "store"
    if not store.strip():
        raise ValueError("its name is empty: leave it out for `store` in the workspace")
    if "://" not in store:
        return resolve_path(store)
    name = hashlib.sha256(str(ObjectRoot.parse(store)).encode()).hexdigest()[:16]
    return workspace / "cache" / "s3" / name


def resolve_path(path: str) -> Path:
    """`path` with `~` expanded, relative paths taken from the checkout.

    Raises:
        ConfigError: `~name` of a user who does not exist.
    """
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"the path {path} names nobody's home", remedy="write it out") from error
    return expanded if expanded.is_absolute() else PROJECT_ROOT / expanded


def parse_stages(names: Iterable[str]) -> tuple[Stage, ...]:
    """Stage names in pipeline order.

    Raises:
        ConfigError: for an unknown name, with the valid ones.
    """
    wanted = [name.strip() for name in names if name.strip()]
    unknown = [name for name in wanted if name not in STAGES]
    if unknown or not wanted:
        raise ConfigError(
            f"unknown stage {', '.join(unknown)!r}{perhaps(unknown[0], STAGES)}"
            if unknown
            else "no stage was named",
            expected=f"some of {', '.join(STAGES)}",
        )
    return tuple(stage for stage in STAGES if stage in wanted)


def perhaps(name: str, known: Iterable[str]) -> str:
    """`, perhaps X is meant` with the known name that is nearest; nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", perhaps {near[0]} is meant" if near else ""


def load_profile(path: str | Path, overrides: Iterable[str | Override] = ()) -> RunConfig:
    """Read a YAML profile and apply overrides, those of `--set` as `section.field=value` (values are YAML).

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or value out of range; one line that names where
            it comes from, the field, what was found and what is expected.
    """
    path = find_profile(path)
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"the profile {path} is not YAML: {_yaml_problem(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the profile {path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"the profile {path} is not a mapping", expected="`section: {field: value}`")
    given = [one if isinstance(one, Override) else Override.parse(one) for one in overrides]
    for override in given:
        override.apply(document)
    return parse_config(document, str(path), given)


def find_profile(name: str | Path) -> Path:
    """The path of a profile given by path or by the name of one in `deployments/profiles`.

    Raises:
        ConfigError: no such profile; names those that exist.
    """
    shipped = PROJECT_ROOT / "deployments" / "profiles"
    for candidate in (Path(name), shipped / f"{name}.yaml", shipped / str(name), PROJECT_ROOT / name):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(p.stem for p in shipped.glob("*.yaml"))) or "none shipped"
    raise ConfigError(f"no profile {name}", expected=f"a YAML file or one of: {known}")


def parse_config(
    document: dict[str, Any], source: str = "configuration", overrides: Sequence[Override] = ()
) -> RunConfig:
    """Validate a mapping as a `RunConfig`.

    Args:
        document: the profile, with the overrides applied.
        source: of what the overrides have not set.
        overrides: in the order in which they were applied.

    Raises:
        ConfigError: one line listing each wrong field, by where it comes from.
    """
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        by_origin: dict[str, list[str]] = {}
        for problem in error.errors():
            path, text = [str(part) for part in problem["loc"]], _describe(problem)
            by_origin.setdefault(origin_of(source, overrides, path, text), []).append(text)
        raise ConfigError(
            "; ".join(f"{origin}: {'; '.join(texts)}" for origin, texts in by_origin.items()),
            remedy="`eagle3 config` lists the fields",
        ) from error


def _yaml_problem(error: yaml.YAMLError) -> str:
    """`line 3: mapping values are not allowed here`, with where what could not be read begins."""
    mark, begin = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
    if mark is None:
        return str(getattr(error, "reason", error))
    problem, context = getattr(error, "problem", None), getattr(error, "context", None)
    inside = f" ({context} that begins in line {begin.line + 1})" if begin and context else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{inside}"


def _known_keys(path: Iterable[str | int]) -> tuple[str, ...]:
    """The fields of the section at a path; none where there is no section."""
    section: Any = RunConfig
    for part in path:
        field = section.model_fields.get(part)
        section = field.annotation if field else None
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ()
    return tuple(section.model_fields)


def _describe(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "top level"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where}{perhaps(where.rpartition('.')[2], _known_keys(problem['loc'][:-1]))}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):
        return f"{where}: {problem['ctx']['error']}"  # fields that do not fit together, which it names
    found = repr(problem["input"])
    shown = found if len(found) <= MAX_SHOWN_INPUT else f"{found[:MAX_SHOWN_INPUT]}..."
    return f"{where}: {problem['msg'].removeprefix('Value error, ')} (found {shown})"
