"""What a run will take: bytes, file systems and minutes, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactKind, ArtifactRef
from eagle3_core.config import STAGES, Stage
from eagle3_core.errors import DiskFullError
from eagle3_core.estimate.case import Case, SpaceOption, case_of
from eagle3_core.estimate.minutes import stage_minutes
from eagle3_core.estimate.options import space_options
from eagle3_core.estimate.sizes import Size, state_bytes
from eagle3_core.estimate.space import FileSystemEstimate, Made
from eagle3_core.estimate.workload import Workload
from eagle3_core.identity import resolve_aux_layer_ids
from eagle3_core.planning import MAKING_STAGE, RunPlan
from eagle3_core.target.layers import final_layer_id

NAMED_ITEMS = 3


class ArtifactEstimate(BaseModel):
    """One artifact of the plan."""

    model_config = ConfigDict(frozen=True)
    kind: ArtifactKind
    stage: Stage
    ref: ArtifactRef | None = Field(description="None until the dataset exists.")
    state: str = Field(description="complete, partial or missing.")
    bytes: int = Field(description="Of the finished artifact.")
    new_bytes: int = Field(description="Still to be written.")
    peak_bytes: int = Field(description="At most while it is made.")


class RunEstimate(BaseModel):
    """What a run will take."""

    model_config = ConfigDict(frozen=True)
    workload: Workload
    aux_layer_ids: tuple[int, ...]
    final_layer_id: int
    state_bytes: int = Field(description="Of all hidden states, without what lies beside them in a shard.")
    artifacts: tuple[ArtifactEstimate, ...]
    new_bytes: int = Field(description="That the run leaves, wherever.")
    file_systems: tuple[FileSystemEstimate, ...]
    options: tuple[SpaceOption, ...] = Field(
        default=(), description="Changes that would help where it does not fit, the smallest first."
    )
    minutes: dict[Stage, float] = Field(description="Rough; 0 for what is there already.")

    @property
    def total_minutes(self) -> float:
        """Rough minutes of all stages."""
        return sum(self.minutes.values())

    @property
    def fits(self) -> bool:
        """Whether it fits on every file system."""
        return all(one.fits for one in self.file_systems)


def estimate_run(
    plan: RunPlan, stages: Iterable[Stage] = STAGES, run_id: str | None = None, with_options: bool = True
) -> RunEstimate:
    """Bytes and minutes of the stages that are to run, and what would help if they do not fit.

    Args:
        plan: of the run.
        stages: that will run.
        run_id: whose reservation is the run's own.
        with_options: find out what would help where it does not fit.
    """
    case = case_of(plan, stages, run_id)
    config, target, load = plan.config, plan.target, case.load
    sizes, systems = case.sizes(), case.file_systems()
    artifacts = tuple(_artifact(kind, sizes[kind], case) for kind in sizes)
    minutes = stage_minutes(config, target, load.workload)
    done = {stage for stage in minutes if all(a.state == "complete" for a in artifacts if a.stage == stage)}
    lacking = next((one for one in systems if not one.fits), None)
    return RunEstimate(
        workload=load.workload,
        aux_layer_ids=resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers),
        final_layer_id=final_layer_id(target.num_layers),
        state_bytes=state_bytes(config, target, load),
        artifacts=artifacts,
        new_bytes=sum(artifact.new_bytes for artifact in artifacts),
        file_systems=tuple(systems),
        options=tuple(space_options(case, lacking)) if lacking and with_options else (),
        minutes={
            stage: 0.0 if stage in done else minutes[stage] for stage in minutes if stage in case.wanted
        },
    )


def check_space(estimate: RunEstimate) -> None:
    """Refuse a run that does not fit.

    Raises:
        DiskFullError: names the file system, what is needed and free there, who has reserved what, and the
            smallest change that would make it fit.
    """
    for system in estimate.file_systems:
        if not system.fits:
            raise DiskFullError(space_line(system), remedy=_remedy(estimate))


def space_line(system: FileSystemEstimate) -> str:
    """Need and free space of one file system, in one line."""
    items = sorted(system.items, key=lambda item: -item.peak_bytes)
    largest = [item for item in items if item.peak_bytes][:NAMED_ITEMS]
    named = ", ".join(f"{item.what} {item.peak_bytes:,}" for item in largest)
    verb = "fits" if system.fits else "does not fit"
    line = (
        f"the run {verb} on {system.mount}: it needs {system.need_bytes:,} bytes there at once "
        f"(the largest, each at its own peak: {named}), "
        f"{system.free_bytes:,} are free and {system.reserve_bytes:,} must stay so"
    )
    if system.reserved:
        line += "; reserved by " + ", ".join(f"{run} {size:,}" for run, size in system.reserved.items())
    return line if system.fits else f"{line}; {system.lacking_bytes:,} are lacking"


def _remedy(estimate: RunEstimate) -> str:
    helping = [option for option in estimate.options if not option.lacking_bytes]
    if not helping:
        return "free some space, or set `store` to a larger disk"
    return f"the smallest change that makes it fit: {helping[0].change}"


def _artifact(kind: ArtifactKind, size: Size, case: Case) -> ArtifactEstimate:
    there = case.made.get(kind, Made())
    makes_it = MAKING_STAGE[kind] in case.wanted and there.state != "complete"
    return ArtifactEstimate(
        kind=kind,
        stage=MAKING_STAGE[kind],
        ref=there.ref,
        state=there.state,
        bytes=there.bytes if there.state == "complete" else size.final,
        new_bytes=max(0, size.final - there.bytes) if makes_it else 0,
        peak_bytes=size.peak,
    )
