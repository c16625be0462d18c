"""A run's folder: `<workspace>/runs/<run id>/` with the resolved configuration, logs and the live record.

    config.yaml          the configuration as resolved
    stages.json          RunRecord, replaced atomically at every change
    logs/<stage>.log     complete output of the stage's step; beside it the step's spec and result
    summary.json         written by the report
    report.html          written by the report

The folder may be deleted without losing an artifact: it is made again when a later stage needs it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3_core.artifacts import ArtifactRef, git_commit
from eagle3_core.config import RunConfig, Stage
from eagle3_core.errors import HostError
from eagle3_core.host.process_tree import ProcessId
from eagle3_core.host.redaction import without_secrets
from eagle3_core.store.disk import as_host_error
from eagle3_core.store.files import write_atomic

StageState = Literal["pending", "running", "paused", "completed", "failed", "cancelled", "crashed"]
RunState = Literal["running", "completed", "failed", "cancelled", "crashed"]
GONE = "the run's process is gone"
RECORD_NAME = "stages.json"
CONFIG_NAME = "config.yaml"
SECOND_LETTERS = len("YYYYMMDD-HHMMSS")
RUN_ID_PATTERN = re.compile(r"^\d{8}-\d{6}-[a-z0-9][a-z0-9._-]*-[0-9a-f]{4}$")


class StageRecord(BaseModel):
    """What happened to one stage of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: Stage
    state: StageState = "pending"
    started_at: datetime | None = None
    seconds: float | None = Field(default=None, description="From start to end of the stage, all attempts.")
    attempts: int = 0
    reused: bool = Field(default=False, description="The artifacts were there and matched their hashes.")
    artifacts: tuple[ArtifactRef, ...] = Field(default=(), description="What the stage made or reused.")
    message: str = Field(default="", description="A line on the outcome; the error of a failed stage.")
    log: str | None = Field(default=None, description="Log, relative to the run folder.")
    details: dict[str, Any] = Field(
        default={}, description="Of preflight, plan and cleanup, which leave no artifact."
    )


class RunRecord(BaseModel):
    """The state of a run and of each of its stages."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run_id: str
    name: str
    state: RunState = "running"
    created_at: datetime
    ended_at: datetime | None = None
    message: str = ""
    git_commit: str | None = None
    owner: ProcessId | None = Field(default=None, description="The process that runs the flow.")
    flow_run_id: str | None = Field(default=None, description="Prefect's id of the flow run.")
    flow_run_attempt: int | None = Field(default=None, description="Prefect may run one id several times.")
    stages: tuple[StageRecord, ...]

    def stage(self, name: Stage) -> StageRecord | None:
        """The record of one stage, or None if the run does not have it."""
        return next((record for record in self.stages if record.stage == name), None)


class RunFolder:
    """Reads and writes one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_id(self) -> str:
        """The run id, which is the folder's name."""
        return self.path.name

    def log_path(self, stage: str) -> Path:
        """The log of a stage."""
        return self.path / "logs" / f"{stage}.log"

    def record(self) -> RunRecord:
        """The record; a run whose process is gone counts as crashed, and so does the stage it was in.

        Raises:
            HostError: missing or unreadable.
        """
        record = self._read()
        if record.state == "running" and record.owner is not None and record.owner.is_gone():
            record = self._read()  # it may have ended, and said how, since it was read
            if record.state == "running":
                record = record.model_copy(update={"state": "crashed", "message": GONE})
        return _with_crashed_stages(record) if record.state == "crashed" else record

    def _read(self) -> RunRecord:
        path = self.path / RECORD_NAME
        try:
            return RunRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise HostError(
                f"the run folder {self.path} has no {RECORD_NAME}: it was removed or is not a run folder",
                remedy="start the run again, finished artifacts are reused",
            ) from None
        except (OSError, ValidationError) as error:
            raise HostError(f"cannot read {path} ({' '.join(str(error).split())})") from error

    def write(self, record: RunRecord) -> None:
        """Replace the record.

        Raises:
            HostError: the folder cannot be written.
        """
        try:
            write_atomic(self.path / RECORD_NAME, record.model_dump_json(indent=1))
        except OSError as error:
            raise as_host_error(error) or HostError(
                f"cannot write the run folder {self.path} ({error})"
            ) from error

    def update_stage(self, stage: Stage, **changes: Any) -> StageRecord:
        """Change one stage's record on disk and return it."""
        record = self.record()
        stages = tuple(
            entry.model_copy(update=changes) if entry.stage == stage else entry for entry in record.stages
        )
        self.write(record.model_copy(update={"stages": stages}))
        return next(entry for entry in stages if entry.stage == stage)

    def finish(self, state: RunState, message: str = "") -> RunRecord:
        """Record how the run ended."""
        record = self.record().model_copy(
            update={"state": state, "message": message, "ended_at": datetime.now(UTC)}
        )
        self.write(record)
        return record

    def config(self) -> RunConfig:
        """The configuration as resolved.

        Raises:
            HostError: missing or unreadable.
        """
        path = self.path / CONFIG_NAME
        try:
            return RunConfig.model_validate(yaml.safe_load(path.read_text()))
        except (OSError, ValidationError, yaml.YAMLError) as error:
            raise HostError(f"cannot read {path} ({' '.join(str(error).split())})") from error


def _with_crashed_stages(record: RunRecord) -> RunRecord:
    """The record of a crashed run: the stage that it was in crashed with it."""
    crashed = {"state": "crashed", "message": GONE}
    stages = tuple(
        entry.model_copy(update=crashed) if entry.state in ("running", "paused") else entry
        for entry in record.stages
    )
    return record.model_copy(update={"stages": stages})


def new_run_id(name: str, suffix: str | None = None) -> str:
    """`YYYYMMDD-HHMMSS-<name>-<4 hex>`, in UTC; `suffix` replaces the random digits."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}-{suffix or secrets.token_hex(2)}"


def create_run_folder(
    config: RunConfig,
    stages: Sequence[Stage],
    run_id: str,
    flow_run_id: str | None = None,
    flow_run_attempt: int | None = None,
) -> RunFolder:
    """Make the folder of a new run.

    Raises:
        HostError: the workspace cannot be written.
    """
    folder = RunFolder(config.workspace_path / "runs" / run_id)
    record = RunRecord(
        run_id=run_id,
        name=config.name,
        created_at=datetime.now(UTC),
        git_commit=git_commit(),
        owner=ProcessId.current(),
        flow_run_id=flow_run_id,
        flow_run_attempt=flow_run_attempt,
        stages=tuple(StageRecord(stage=stage) for stage in stages),
    )
    try:
        folder.log_path("run").parent.mkdir(parents=True, exist_ok=True)
        write_config(folder, config)
    except OSError as error:
        raise HostError(
            f"cannot make the run folder {folder.path} ({error})",
            remedy="set `workspace` to a folder that can be written",
        ) from error
    folder.write(record)
    return folder


def write_config(folder: RunFolder, config: RunConfig) -> None:
    """Write the resolved configuration into the run folder, secrets masked."""
    document = yaml.safe_dump(without_secrets(config).model_dump(mode="json"), sort_keys=False)
    write_atomic(folder.path / CONFIG_NAME, document)


def list_runs(workspace: Path) -> list[RunFolder]:
    """Run folders of a workspace, oldest first; one whose making was interrupted is no run."""
    paths = [path for path in (workspace / "runs").glob("*") if RUN_ID_PATTERN.match(path.name)]
    return [RunFolder(path) for path in sorted(paths, key=_begun) if (path / RECORD_NAME).is_file()]


def killed_runs(workspace: Path) -> list[tuple[RunFolder, RunRecord]]:
    """Runs whose process is gone while their records on disk still say that they run.

    A run folder that cannot be read is left alone.
    """
    killed = []
    for folder in list_runs(workspace):
        with contextlib.suppress(HostError):
            record = folder.record()
            if record.state == "crashed" and record.ended_at is None:
                killed.append((folder, record))
    return killed


def _begun(path: Path) -> tuple[str, int, str]:
    """When a run began: its id says the second, and its configuration was written then and never again."""
    try:
        written = (path / CONFIG_NAME).stat().st_mtime_ns
    except OSError:
        written = 0
    return path.name[:SECOND_LETTERS], written, path.name


def used_by_runs(workspace: Path) -> dict[ArtifactRef, str]:
    """What the stages of a workspace's runs in progress have made or taken, and how to say so.

    A run whose record cannot be read is none.
    """
    used: dict[ArtifactRef, str] = {}
    for folder in list_runs(workspace):
        with contextlib.suppress(HostError):
            record = folder.record()
            if record.state == "running":
                why = f"the run {record.run_id} in this workspace uses it"
                used |= {ref: why for stage in record.stages for ref in stage.artifacts}
    return used


def find_run(workspace: Path, name: str) -> RunFolder:
    """A run by its id, by a unique part of it, by its path, or `latest`.

    Raises:
        HostError: none or several match.
    """
    if (Path(name) / RECORD_NAME).is_file():
        return RunFolder(Path(name).resolve())
    runs = list_runs(workspace)
    matches = runs[-1:] if name == "latest" else [run for run in runs if name in run.run_id]
    exact = [run for run in matches if run.run_id == name]
    matches = exact or matches
    if len(matches) != 1:
        known = ", ".join(run.run_id for run in (matches or runs)[-5:]) or "none yet"
        what = f"{len(matches)} runs match" if matches else "no run matches"
        raise HostError(f"{what} {name!r} in {workspace / 'runs'}", remedy=f"the latest are: {known}")
    return matches[0]
