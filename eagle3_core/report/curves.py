"""The curves of a training, read from the metrics beside its checkpoint and thinned for a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from eagle3_core.artifacts import ArtifactRef
from eagle3_core.contracts import METRICS_FILE
from eagle3_core.errors import StoreError
from eagle3_core.store.local import LocalStore

MAX_POINTS = 200
"""Of a curve; more are averaged in groups of neighbours."""


class Curve(BaseModel):
    """Values over optimizer steps."""

    model_config = ConfigDict(frozen=True)
    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]


class TrainingCurves(BaseModel):
    """What a training's metrics say; a curve without points is empty."""

    model_config = ConfigDict(frozen=True)
    loss: Curve
    learning_rate: Curve
    tokens_per_second: Curve
    heldout_loss: Curve
    acceptance_length: Curve
    agreement: tuple[Curve, ...] = ()
    """Of each TTT step: agreement with the target where it was agreed with at all steps before."""


def read_curves(store: LocalStore, ref: ArtifactRef) -> TrainingCurves | None:
    """The curves of a checkpoint; None where it has no metrics.

    Raises:
        StoreError: its metrics cannot be read.
    """
    path = store.folder(ref) / METRICS_FILE
    try:
        if path.is_file():
            return training_curves(_records(path.read_bytes()))
        manifest = store.find(ref)
        entry = manifest.file(METRICS_FILE) if manifest else None
        if entry is None:
            return None
        return training_curves(_records(store.read_range(ref, entry.path, 0, entry.bytes)))
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"the metrics of {ref} cannot be read ({error})") from error


def training_curves(records: Sequence[dict[str, Any]]) -> TrainingCurves:
    """Curves from the records of `metrics.jsonl`."""
    steps = [record for record in records if record["type"] == "step"]
    evaluations = [record for record in records if record["type"] == "evaluation"]
    lengths = [{"step": each["step"], "length": each["heldout"]["acceptance_length"]} for each in evaluations]
    return TrainingCurves(
        loss=_curve("training", steps, "loss"),
        learning_rate=_curve("learning rate", steps, "learning_rate"),
        tokens_per_second=_curve("tokens/s", steps, "tokens_per_second"),
        heldout_loss=_curve("held-out", evaluations, "heldout_loss"),
        acceptance_length=_curve("held-out estimate", lengths, "length"),
        agreement=_agreement(steps),
    )


def _agreement(steps: Sequence[dict[str, Any]]) -> tuple[Curve, ...]:
    depth = max((len(step.get("conditional", ())) for step in steps), default=0)
    return tuple(
        _curve(
            f"k={number + 1}",
            [{"step": step["step"], "rate": step["conditional"][number]} for step in steps],
            "rate",
        )
        for number in range(depth)
    )


def _curve(name: str, records: Sequence[dict[str, Any]], field: str) -> Curve:
    points = [
        (float(record["step"]), float(value))
        for record in records
        if (value := record.get(field)) is not None and math.isfinite(value)
    ]
    size = max(1, math.ceil(len(points) / MAX_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return Curve(
        name=name,
        steps=tuple(sum(step for step, _ in group) / len(group) for group in groups),
        values=tuple(sum(value for _, value in group) / len(group) for group in groups),
    )


def _records(content: bytes) -> list[dict[str, Any]]:
    """Whole lines; the last one may still be on its way."""
    return [json.loads(line) for line in content.split(b"\n")[:-1] if line]
