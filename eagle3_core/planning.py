"""What a run will make: artifact ids, and which stage makes and needs which artifact.

Ids of conversations, dataset and vocabulary are known from the configuration alone; the rest is known once
the dataset exists, because a capture is determined by the dataset's content.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from eagle3_core import identity
from eagle3_core.artifacts import ArtifactKind, ArtifactPlan, ArtifactRef, Manifest, differing_keys
from eagle3_core.config import STAGES, RunConfig, Stage
from eagle3_core.errors import ConfigError, MissingInputError
from eagle3_core.host.engine_info import EngineVersions, engine_versions
from eagle3_core.store.local import LocalStore
from eagle3_core.store.open import open_store
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.locate import present_target

STAGE_OUTPUTS: dict[Stage, tuple[ArtifactKind, ...]] = {
    "prepare": ("conversations", "dataset", "vocabulary"),
    "extract": ("capture",),
    "verify": ("verification",),
    "train": ("labels", "checkpoint"),
    "export": ("export",),
    "benchmark": ("benchmark",),
}
"""Artifacts that a stage makes; the last one carries the stage's result."""

STAGE_INPUTS: dict[Stage, tuple[ArtifactKind, ...]] = {
    "prepare": (),
    "extract": ("dataset",),
    "verify": ("dataset", "capture"),
    "train": ("dataset", "vocabulary", "capture", "verification"),
    "export": ("vocabulary", "checkpoint"),
    "benchmark": ("dataset", "export"),
}
"""Artifacts that a stage reads."""

MAKING_STAGE: dict[ArtifactKind, Stage] = {
    kind: stage for stage, kinds in STAGE_OUTPUTS.items() for kind in kinds
}


def inputs_from_the_store(stages: Collection[Stage]) -> list[tuple[Stage, ArtifactKind]]:
    """What stages read that none of them makes, in pipeline order."""
    return [
        (stage, kind)
        for stage in STAGES
        if stage in stages
        for kind in STAGE_INPUTS.get(stage, ())
        if MAKING_STAGE[kind] not in stages
    ]


@dataclass(frozen=True)
class RunPlan:
    """Everything that is decided before a step starts.

    Attributes:
        config: the run's configuration.
        target_path: folder of the target.
        target: facts of the target.
        versions: versions of the engine environment.
        store: where the artifacts are.
        artifacts: plans by kind, in the order of making; those whose id is not known yet are absent.
    """

    config: RunConfig
    target_path: Path
    target: TargetInfo
    versions: EngineVersions
    store: LocalStore
    artifacts: dict[ArtifactKind, ArtifactPlan]

    def manifest(self, kind: ArtifactKind) -> Manifest | None:
        """The manifest of an artifact, partial or complete, or None."""
        plan = self.artifacts.get(kind)
        return self.store.find(plan.ref) if plan else None

    def outputs(self, stage: Stage) -> dict[ArtifactKind, ArtifactPlan]:
        """Plans of what a stage makes.

        Raises:
            MissingInputError: not known yet, because an earlier stage has not run.
        """
        made = STAGE_OUTPUTS[stage]
        if self.config.data.capture is not None:
            made = tuple(kind for kind in made if kind != "conversations")
        return {kind: self._plan(kind, stage) for kind in made}

    def inputs(self, stage: Stage) -> dict[ArtifactKind, ArtifactRef]:
        """What a stage reads, complete in the store.

        Raises:
            MissingInputError: an artifact is missing; names the stage that makes it.
        """
        return {kind: self._input(kind, stage) for kind in STAGE_INPUTS[stage]}

    def check_inputs(self, stages: Collection[Stage]) -> None:
        """Whether all that these stages read, and none of them makes, is complete in the store.

        Raises:
            MissingInputError: as `inputs`.
        """
        for stage, kind in inputs_from_the_store(stages):
            if kind in self.artifacts or "prepare" not in stages:  # else it is known after prepare
                self._input(kind, stage)

    def _input(self, kind: ArtifactKind, stage: Stage) -> ArtifactRef:
        plan = self._plan(kind, stage)
        manifest = self.store.find(plan.ref)
        if manifest is None or manifest.state != "complete":
            raise self._missing(stage, kind, str(plan.ref))
        return plan.ref

    def _plan(self, kind: ArtifactKind, stage: Stage) -> ArtifactPlan:
        if kind not in self.artifacts:
            raise self._missing(stage, "dataset", str(self.artifacts["dataset"].ref))
        return self.artifacts[kind]

    def _missing(self, stage: Stage, kind: ArtifactKind, name: str) -> MissingInputError:
        first = STAGES.index(MAKING_STAGE[kind])
        needed = ",".join(STAGES[first : STAGES.index(stage) + 1])
        return MissingInputError(
            f"the stage {stage} needs {name}, which is not complete in {self.store.place}",
            remedy=f"run the stage {MAKING_STAGE[kind]} first (`--stages {needed}`)",
        )


def plan_run(config: RunConfig) -> RunPlan:
    """Look at target, engine environment and store, and decide every id that can be known now.

    Raises:
        TargetError: the target is missing, unreadable or too small for the layer ids.
        HostError: the engine environment is missing or incomplete.
        DataError: a prompt file is missing or the draft vocabulary is larger than the target's.
    """
    target_path = present_target(config)
    target = inspect_target(target_path)
    versions = engine_versions(config.engine)
    store = open_store(config)
    artifacts = plan_artifacts(config, target, versions, store)
    return RunPlan(config, target_path, target, versions, store, artifacts)


def plan_artifacts(
    config: RunConfig, target: TargetInfo, versions: EngineVersions, store: LocalStore
) -> dict[ArtifactKind, ArtifactPlan]:
    """Plans by kind, in the order of making."""
    identity.resolve_aux_layer_ids(config.target.aux_layer_ids, target.num_layers)
    plans: dict[ArtifactKind, ArtifactPlan] = {}
    capture: ArtifactPlan | None
    if config.data.capture is not None:
        dataset, capture = plan_imported(config, target, store, config.data.capture)
    else:
        plans["conversations"] = identity.plan_conversations(config, target, versions.vllm)
        dataset = identity.plan_dataset(config, target, plans["conversations"].ref)
        capture = _plan_capture(config, target, versions, store, dataset.ref)
    vocabulary = identity.plan_vocabulary(config, target, dataset.ref)
    plans |= {"dataset": dataset, "vocabulary": vocabulary}
    if capture is None:
        return plans
    checkpoint = identity.plan_checkpoint(config, target, capture.ref, vocabulary.ref)
    export = identity.plan_export(config, target, checkpoint.ref)
    return plans | {
        "capture": capture,
        "verification": identity.plan_verification(config, capture.ref),
        "labels": identity.plan_labels(capture.ref, vocabulary.ref),
        "checkpoint": checkpoint,
        "export": export,
        "benchmark": identity.plan_benchmark(config, export.ref, dataset.ref, versions.vllm),
    }


def plan_imported(
    config: RunConfig, target: TargetInfo, store: LocalStore, name: str
) -> tuple[ArtifactPlan, ArtifactPlan]:
    """The plans of an imported capture's dataset and of the capture.

    Raises:
        StoreError: it is not complete in the store.
        ConfigError: it was not imported, or with other settings than these.
    """
    found = store.read(ArtifactRef.parse(name))
    planned = identity.plan_of_imported_capture(config, target, found)
    if planned is None:
        raise ConfigError(
            f"data.capture names {found.ref}, which was not imported",
            remedy="leave data.capture out: a run finds the captures that runs have made",
        )
    if planned.ref != found.ref:
        differing = "; ".join(differing_keys(planned.identity, found.identity))
        raise ConfigError(
            f"data.capture names {found.ref}, which was imported with other settings ({differing})",
            remedy="change the profile, or import it again with this one",
        )
    dataset = store.read(planned.parents["dataset"])
    return ArtifactPlan(kind="dataset", identity=dataset.identity, parents=dataset.parents), planned


def _plan_capture(
    config: RunConfig, target: TargetInfo, versions: EngineVersions, store: LocalStore, dataset: ArtifactRef
) -> ArtifactPlan | None:
    content_hash = dataset_content_hash(store, dataset)
    if content_hash is None:
        return None
    engine = versions.capture_engine(config)
    return identity.plan_capture(config, target, dataset, content_hash, engine)


def dataset_content_hash(store: LocalStore, dataset: ArtifactRef) -> str | None:
    """The content hash of a complete dataset, or None."""
    manifest = store.find(dataset)
    if manifest is None or manifest.state != "complete":
        return None
    return manifest.facts.get("content_hash")
