"""What the handlers of all stages share: a stage's run, what comes back, where its lines go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.config import RunConfig, Stage
from eagle3_core.contracts import ProgressEvent, StepName
from eagle3_core.host.engine_environment import capture_engine_config
from eagle3_core.host.process import run_step
from eagle3_core.host.run_folder import RunFolder
from eagle3_core.planning import RunPlan, plan_run
from eagle3_core.run_space import RunSpace
from eagle3_core.store.uses import RunUse

CAPTURE_STEPS: tuple[StepName, ...] = ("extract", "probe")
"""Steps that run in the environment of the capture engine."""


@dataclass(frozen=True)
class Callbacks:
    """Where a stage's lines and progress go; `on_tick` may raise to end the stage."""

    on_line: Callable[[str], None] | None = None
    on_progress: Callable[[ProgressEvent], None] | None = None
    on_tick: Callable[[], None] | None = None


class StageOutcome(BaseModel):
    """What a stage made; small, it crosses Prefect."""

    model_config = ConfigDict(frozen=True)
    stage: Stage
    reused: bool = False
    artifacts: tuple[ArtifactRef, ...] = ()
    seconds: float = 0.0
    message: str = ""
    result: dict[str, Any] = Field(default={}, description="The step's result.")
    details: dict[str, Any] = Field(default={}, description="Of stages without an artifact.")


@dataclass(frozen=True)
class StageRun:
    """One stage of a run, while it runs."""

    config: RunConfig
    folder: RunFolder
    callbacks: Callbacks
    use: RunUse
    space: RunSpace

    def plan(self) -> RunPlan:
        """Decide every id that can be known now, and note in the store that this run uses them.

        The note comes before anybody looks what is there: garbage collection leaves alone what it names.
        """
        plan = plan_run(self.config)
        self.use.say(plan.store, (planned.ref for planned in plan.artifacts.values()))
        return plan

    def step(self, name: StepName, spec: BaseModel) -> Any:
        """Run a step with this run's settings."""
        return run_step(
            name,
            spec,
            engine=capture_engine_config(self.config) if name in CAPTURE_STEPS else self.config.engine,
            folder=self.folder.log_path(name).parent,
            on_line=self.callbacks.on_line,
            on_progress=self.space.progress,
            on_tick=self.space.tick,
            timeout_seconds=self.config.limits.step_timeout_minutes * 60,
        )
