"""Checks one artifact: its files without an engine, and what a capture's states mean with one.

The files of an artifact exist, have the size that the manifest says (and, of a shard, the size that the plan
says), and match their hash. A store in a bucket is asked for sizes and recorded checksums, nothing is
downloaded; with `deep` what is no capture is downloaded and hashed. Of a capture the step `verify` then reads
every shard, and condemns those that the next extract must make anew.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactKind, ArtifactPlan, ArtifactRef, FileEntry, Manifest
from eagle3_core.capture.job import capture_layout
from eagle3_core.config import RunConfig
from eagle3_core.contracts import ProgressEvent, StepSpec, VerifyResult
from eagle3_core.errors import ConfigError, HostError, StepError, StoreError
from eagle3_core.host.process import run_step
from eagle3_core.host.redaction import without_secrets
from eagle3_core.host.run_folder import RunFolder
from eagle3_core.identity import plan_of_imported_capture, plan_verification
from eagle3_core.planning import RunPlan, plan_run
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.local import HASHING_THREADS, LocalStore, strangers
from eagle3_core.store.remote import RemoteStore
from eagle3_core.store.shards import plan_shards, shard_file_bytes
from eagle3_core.store.uses import RunUse, end_use

Meaning = Literal["no capture", "not asked", "not checked", "right", "wrong"]
OnFile = Callable[[FileEntry], None]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Problem(_Part):
    """One thing that is wrong with an artifact."""

    where: str = Field(description="A file, or a sample of one.")
    problem: str


class ArtifactCheck(_Part):
    """What was found."""

    format_version: Literal[1] = 1
    artifact: str
    store: str
    state: Literal["complete", "partial"]
    num_files: int
    bytes: int
    seconds: float = Field(description="For the files.")
    problems: tuple[Problem, ...]
    unnamed_files: tuple[str, ...] = Field(
        default=(), description="Files beside those of the manifest; the stage cleanup removes them."
    )
    meaning: Meaning = Field(description="Of a capture: what the step `verify` says of its states.")
    findings: dict[str, Any] = Field(default={}, description="All findings of the step `verify`.")

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems and self.meaning != "wrong"


def check_files(
    store: LocalStore, ref: ArtifactRef, *, deep: bool = False, on_file: OnFile | None = None
) -> ArtifactCheck:
    """Existence, size and hash of every file, several side by side.

    Args:
        store: where the artifact is.
        ref: the artifact.
        deep: download what lies in a bucket and hash it; not shards, which the step `verify` reads.
        on_file: called in this thread after each file.

    Raises:
        StoreError: there is no such artifact, its manifest cannot be read or the store not be reached.
    """
    started = time.monotonic()
    manifest = store.find(ref)
    if manifest is None:
        raise StoreError(f"{ref} is not in {store.place}", remedy="set --store or --workspace")
    problems = [Problem(where=path, problem=text) for path, text in _file_problems(store, manifest, on_file)]
    if manifest.state != "complete":
        problems.insert(0, Problem(where="manifest.json", problem="the artifact is not complete"))
    if deep and not problems and isinstance(store, RemoteStore) and ref.kind != "capture":
        store.fetch(ref)
    beside = [] if isinstance(store, RemoteStore) else strangers(store.folder(ref), manifest)
    return ArtifactCheck(
        artifact=str(ref),
        store=store.place,
        state=manifest.state,
        num_files=len(manifest.files),
        bytes=manifest.bytes,
        seconds=round(time.monotonic() - started, 3),
        problems=tuple(problems),
        unnamed_files=tuple(path.name for path in beside),
        meaning="not asked" if ref.kind == "capture" else "no capture",
    )


def _file_problems(store: LocalStore, manifest: Manifest, on_file: OnFile | None) -> list[tuple[str, str]]:
    def check(entry: FileEntry) -> dict[str, str]:
        return store.problems(manifest.model_copy(update={"files": (entry,)}))

    found: list[tuple[str, str]] = []
    with ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="check") as pool:
        for entry, problems in zip(manifest.files, pool.map(check, manifest.files), strict=True):
            found += problems.items()
            if on_file is not None:
                on_file(entry)
    return found


def making_config(store: LocalStore, ref: ArtifactRef, workspace: Path) -> RunConfig:
    """The configuration of the run that made an artifact, from its run folder.

    Raises:
        ConfigError: the folder is gone, or the artifact does not say which run made it.
    """
    run_id = store.read(ref).provenance.run_id
    try:
        if run_id is None:
            raise HostError(f"{ref} does not say which run made it")
        return RunFolder(workspace / "runs" / run_id).config()
    except HostError as error:
        raise ConfigError(
            f"the configuration that made {ref} is not known ({error.found})",
            remedy="name it with --profile, or check the files alone with --files-only",
        ) from error


def check_states(
    check: ArtifactCheck,
    store: LocalStore,
    ref: ArtifactRef,
    config: RunConfig,
    *,
    deep: bool = False,
    on_progress: Callable[[ProgressEvent], None] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> ArtifactCheck:
    """Let the step `verify` read every shard of a capture; its result is a verification in the store.

    Args:
        check: of the capture's files, all right.
        store: where the capture is.
        ref: the capture.
        config: of the run that made it; its limits decide.
        deep: compare samples of every shard with a transformers forward.
        on_progress: called with the step's progress.
        on_line: called with the step's log.

    Raises:
        ConfigError: the configuration makes another capture.
        StepError: the step could not be carried out.
    """
    config = config.model_copy(update={"store": store.place})
    if deep:
        verify = config.verify.model_copy(
            update={"deep": True, "reference_samples": max(1, config.verify.reference_samples)}
        )
        config = config.model_copy(update={"verify": verify})
    plan = _planned(config, store, ref)
    planned = plan.artifacts.get("capture")
    if planned is None or planned.ref != ref:
        made = planned.ref if planned else "no capture yet: its dataset is missing"
        raise ConfigError(
            f"the profile {config.name} makes {made}",
            expected=str(ref),
            remedy="name another --profile",
        )
    written = _size_problems(plan, store.read(ref))
    if written:
        return check.model_copy(update={"problems": tuple(written), "meaning": "not checked"})
    return _run_verify(check, plan, config, on_progress, on_line)


def _planned(config: RunConfig, store: LocalStore, ref: ArtifactRef) -> RunPlan:
    """What the configuration makes; of an imported capture what it would import, with its own dataset."""
    plan = plan_run(config)
    imported = plan_of_imported_capture(config, plan.target, store.read(ref))
    if imported is None:
        return plan
    dataset = store.read(imported.parents["dataset"])
    artifacts: dict[ArtifactKind, ArtifactPlan] = {
        "dataset": ArtifactPlan(kind="dataset", identity=dataset.identity, parents=dataset.parents),
        "capture": imported,
        "verification": plan_verification(config, imported.ref),
    }
    return dataclasses.replace(plan, artifacts=artifacts)


def _size_problems(plan: RunPlan, manifest: Manifest) -> list[Problem]:
    """Shards that are missing, or whose bytes are not those that their samples need."""
    samples = read_dataset(plan.store.fetch(plan.inputs("extract")["dataset"]))
    layout = capture_layout(plan.config, plan.target)
    problems = []
    for shard in plan_shards(samples, layout, int(plan.config.capture.shard_bytes)):
        entry = manifest.file(shard.file_name)
        if entry is None:
            problems.append(Problem(where=shard.file_name, problem="planned, but not in the manifest"))
            continue
        left_out = entry.facts.get("quarantined", {})
        kept = [sample for sample in samples[shard.start : shard.end] if sample.key not in left_out]
        planned = shard_file_bytes(kept, layout)
        if entry.bytes != planned:
            problems.append(
                Problem(
                    where=shard.file_name, problem=f"{entry.bytes:,} bytes written, {planned:,} were planned"
                )
            )
    return problems


def _run_verify(
    check: ArtifactCheck,
    plan: RunPlan,
    config: RunConfig,
    on_progress: Callable[[ProgressEvent], None] | None,
    on_line: Callable[[str], None] | None,
) -> ArtifactCheck:
    inputs, outputs = plan.inputs("verify"), plan.outputs("verify")
    name = f"verify-{plan.artifacts['capture'].ref.id}-{os.getpid()}"
    spec = StepSpec(
        config=without_secrets(config),
        run_id=name,
        target_path=str(plan.target_path),
        outputs={str(kind): planned for kind, planned in outputs.items()},
        inputs={str(kind): ref for kind, ref in inputs.items()},
    )
    try:
        with RunUse(name) as use:
            use.say(plan.store, inputs.values())
            result: VerifyResult = run_step(
                "verify",
                spec,
                engine=config.engine,
                folder=config.workspace_path / "cache" / "logs",
                on_progress=on_progress,
                on_line=on_line,
                timeout_seconds=config.limits.step_timeout_minutes * 60,
            )
    except StepError as error:
        if error.error_type != "VerificationError":
            raise
        return _wrong(check, error)
    finally:
        end_use(plan.store, name)
    return check.model_copy(update={"meaning": "right", "findings": result.model_dump(mode="json")})


def _wrong(check: ArtifactCheck, error: StepError) -> ArtifactCheck:
    findings = dict(error.details)
    problems = [
        Problem(where=shard["shard"], problem=shard["reason"]) for shard in findings.get("condemned", ())
    ]
    problems += [
        Problem(where=f"{bad['key']} in {bad['shard']}", problem=bad["problem"])
        for bad in findings.get("bad_samples", ())
    ]
    problems = problems or [Problem(where=check.artifact, problem=error.found)]
    return check.model_copy(
        update={"problems": (*check.problems, *problems), "meaning": "wrong", "findings": findings}
    )
