"""Asks the probe before a run spends anything, and remembers its answer; needs no torch."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from eagle3_core.capture.probe_plan import probe_key, remember, remembered
from eagle3_core.capture.probe_record import result_line, with_cause
from eagle3_core.config import RunConfig, Stage
from eagle3_core.contracts import ProbeResult, ProbeSpec
from eagle3_core.errors import Eagle3Error, ProbeError, StepError, TargetError
from eagle3_core.host.engine_info import EngineVersions, capture_versions
from eagle3_core.host.process import STARTED_MARK
from eagle3_core.host.redaction import without_secrets
from eagle3_core.planning import plan_run
from eagle3_core.target.locate import present_target

logger = logging.getLogger(__name__)

CHECK_NAME = "capture probe"
SWITCH_OFF = "set capture.probe to false to go on all the same"

RunProbe = Callable[[ProbeSpec], ProbeResult]


class ProbeCheck(BaseModel):
    """What preflight says of the probe; `result` is None where none was needed."""

    model_config = ConfigDict(frozen=True)
    found: str
    result: ProbeResult | None = None


def check_probe(
    config: RunConfig, stages: Sequence[Stage], scratch: Path, run: RunProbe, log: Path | None = None
) -> ProbeCheck:
    """Whether the engine captures this target's architecture as it should; asks at most once.

    Args:
        config: the run's.
        stages: that will run.
        scratch: folder for the miniature, removed afterwards.
        run: runs the step.
        log: where the step's output goes.

    Raises:
        ProbeError: it does not; names engine, version, architecture and what is wrong.
    """
    if "extract" not in stages:
        return ProbeCheck(found="not needed: nothing will be captured")
    if not config.capture.probe:
        logger.warning("capture.probe is false: nobody knows which layers %s captures", config.capture.engine)
        return ProbeCheck(found="switched off (capture.probe is false)")
    plan = plan_run(config)
    capture = plan.manifest("capture")
    if capture is not None and capture.state == "complete":
        return ProbeCheck(found=f"not needed: {capture.ref} is complete")
    document = target_document(plan.target_path)
    versions = capture_versions(config)
    result = ask(config, document, versions, scratch, run, log=log)
    engine = versions.capture_engine(config)
    require_right(result, engine, log)
    return ProbeCheck(found=f"{engine} and {result.architecture}: {result_line(result)}", result=result)


def ask(
    config: RunConfig,
    document: dict[str, Any],
    versions: EngineVersions,
    scratch: Path,
    run: RunProbe,
    fresh: bool = False,
    log: Path | None = None,
) -> ProbeResult:
    """The remembered answer, or a new one, which is remembered.

    Args:
        config: the run's.
        document: the target's `config.json`.
        versions: of the environment that captures.
        scratch: folder for the miniature, removed afterwards.
        run: runs the step.
        fresh: ask again even if the answer is known.
        log: where the step's output goes; a failure names its first error.

    Raises:
        ProbeError: no miniature can be made of the target, or the step ended without an answer.
    """
    try:
        key = probe_key(config, document, versions)
    except TargetError as error:
        raise ProbeError(error.found, expected=error.expected, remedy=error.remedy) from error
    known = None if fresh else remembered(config, key)
    if known is not None:
        return known
    spec = ProbeSpec(config=without_secrets(config), target_config=document, folder=str(scratch))
    try:
        result = with_cause(run(spec), _last_lines(log))
    except StepError as error:
        engine = versions.capture_engine(config)
        raise ProbeError(
            f"the probe of {engine} with {_architecture(document)} ended: {error.found}",
            remedy=f"see {error.log_path}, or {SWITCH_OFF}",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    remember(config, key, result)
    return result


def require_right(result: ProbeResult, engine: str, log: Path | None = None) -> None:
    """Refuse an engine that the probe did not find right.

    Args:
        result: the answer.
        engine: its name and version.
        log: where the step's output went.

    Raises:
        ProbeError: one line.
    """
    if result.outcome == "ok":
        return
    found = {
        "wrong": f"{engine} does not capture {result.architecture} as it should: {result.reason}",
        "unsupported": f"{engine} cannot capture {result.architecture}: {result.reason}",
        "failed": f"{engine} failed to capture a miniature of {result.architecture}: {result.reason}",
    }[result.outcome]
    see = f"see {log}; " if log is not None and result.outcome == "failed" else ""
    raise ProbeError(
        found, remedy=f"{see}use another version of the engine or another capture.engine; {SWITCH_OFF}"
    )


def _last_lines(log: Path | None) -> list[str]:
    """What the last step wrote to its log, which grows from step to step."""
    try:
        text = log.read_text(errors="replace") if log is not None else ""
    except OSError:
        return []
    return text.rpartition(STARTED_MARK)[2].splitlines()


def remembered_check(config: RunConfig) -> str:
    """What is known without asking: for a look at the host that should be quick."""
    if not config.capture.probe:
        return "switched off (capture.probe is false)"
    try:
        document = target_document(present_target(config))
        result = remembered(config, probe_key(config, document, capture_versions(config)))
    except Eagle3Error:
        return "not asked yet: it needs the target and the engine"
    if result is None:
        return "not asked yet: a run does before it captures"
    return f"{result_line(result)}, on {result.made_at[:10]}"


def target_document(folder: Path) -> dict[str, Any]:
    """A target's whole `config.json`, its wrapper included.

    Raises:
        TargetError: it cannot be read.
    """
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read {folder / 'config.json'} ({error})") from error


def _architecture(document: dict[str, Any]) -> str:
    return str((document.get("architectures") or ["unknown"])[0])
