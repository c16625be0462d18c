"""What determines how many bytes a run needs, so that other settings can be tried on the same figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.artifacts import ArtifactKind
from eagle3_core.config import RunConfig, Stage
from eagle3_core.estimate.sizes import Size, artifact_sizes, event_file_bytes
from eagle3_core.estimate.space import FileSystemEstimate, Made, SpaceItem, file_systems, space_items
from eagle3_core.estimate.workload import Load, load_of
from eagle3_core.planning import MAKING_STAGE, RunPlan


class SpaceOption(BaseModel):
    """A change after which a run that does not fit needs less."""

    model_config = ConfigDict(frozen=True)
    change: str
    need_bytes: int = Field(description="Then needed on the file system that is too small.")
    lacking_bytes: int = Field(description="By which it still does not fit; 0 if it does.")


@dataclass(frozen=True)
class Case:
    """What determines how much a run needs.

    Attributes:
        config: settings.
        plan: of the run as it is configured.
        load: samples.
        made: what is there already.
        wanted: stages that run.
        run_id: whose reservation is the run's own.
    """

    config: RunConfig
    plan: RunPlan
    load: Load
    made: Mapping[ArtifactKind, Made]
    wanted: frozenset[Stage]
    run_id: str | None = None

    def sizes(self) -> dict[ArtifactKind, Size]:
        """Of all artifacts."""
        return artifact_sizes(self.config, self.plan.target, self.load)

    def items(self) -> list[SpaceItem]:
        """Everything that is still to be written on this host."""
        sizes = self.sizes()
        shard = min(int(self.config.capture.shard_bytes), sizes["capture"].final)
        events = event_file_bytes(self.config, self.load.workload)
        return space_items(self.config, sizes, self.made, self.wanted, shard, events)

    def file_systems(self) -> list[FileSystemEstimate]:
        """The file systems that these lie on."""
        same = [str(one.ref) for one in self.made.values() if one.ref]
        return file_systems(self.config, self.items(), self.run_id, same)


def case_of(plan: RunPlan, stages: Iterable[Stage], run_id: str | None = None) -> Case:
    """The case of a planned run.

    Raises:
        DataError: as `load_of`.
    """
    made = {}
    for kind in MAKING_STAGE:
        known, manifest = plan.artifacts.get(kind), plan.manifest(kind)
        if known is not None:
            made[kind] = Made(
                ref=known.ref,
                state=manifest.state if manifest else "missing",
                bytes=manifest.bytes if manifest else 0,
            )
    return Case(plan.config, plan, load_of(plan), made, frozenset(stages), run_id)
