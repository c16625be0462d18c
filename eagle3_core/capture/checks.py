"""Pure comparisons of stored shards and samples with their plan and the dataset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle3_core.capture.compare import nonfinite_counts
from eagle3_core.contracts import NonFinite
from eagle3_core.errors import VerificationError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import TORCH_DTYPES, CapturedSample, PlannedShard, ShardLayout, ShardReader

MAX_SHOWN = 80


def check_file_names(found: Sequence[str], shards: Sequence[PlannedShard]) -> None:
    """Compare a capture's files with the planned shards.

    Raises:
        VerificationError: missing or extra files.
    """
    planned = {shard.file_name for shard in shards}
    missing, extra = sorted(planned - set(found)), sorted(set(found) - planned)
    if missing or extra:
        raise VerificationError(
            f"the capture lacks {', '.join(missing) or 'nothing'} and has besides "
            f"{', '.join(extra) or 'nothing'}",
            expected=f"{len(planned)} planned shards",
            remedy="run the stage extract again",
        )


def shard_problem(reader: ShardReader, expected: Sequence[Sample], layout: ShardLayout) -> str | None:
    """How a shard as a whole differs from its plan, or None."""
    found = {
        "auxiliary ids": reader.aux_layer_ids,
        "final id": reader.final_layer_id,
        "final-state policy": reader.final_state,
        "hidden size": reader.hidden_size,
        "dtype": TORCH_DTYPES.get(reader.dtype, reader.dtype),
        "samples": len(reader),
        "keys": reader.keys,
    }
    planned = {
        "auxiliary ids": layout.aux_layer_ids,
        "final id": layout.final_layer_id,
        "final-state policy": layout.final_state,
        "hidden size": layout.hidden_size,
        "dtype": layout.dtype,
        "samples": len(expected),
        "keys": [sample.key for sample in expected],
    }
    for name, value in planned.items():
        if found[name] != value:
            return f"{name} {_short(found[name])} instead of {_short(value)}"
    return None


def content_problem(stored: CapturedSample, sample: Sample, layout: ShardLayout) -> str | None:
    """How a stored sample differs from the dataset's, its states apart, or None."""
    if len(stored.input_ids) != len(sample):
        return f"{len(stored.input_ids)} rows of states for {len(sample)} tokens"
    for name, ours in (("token ids", stored.input_ids), ("loss mask", stored.loss_mask)):
        theirs = sample.input_ids if name == "token ids" else sample.loss_mask
        differing = np.flatnonzero(ours.numpy() != theirs)
        if len(differing):
            return f"{name} differ from the dataset in {len(differing)} places, first at {differing[0]}"
    rows = sample.final_rows(layout.final_state)
    if not np.array_equal(stored.final_rows.numpy(), rows):
        return f"final states of {len(stored.final_rows)} rows, not of the {len(rows)} that the policy names"
    return None


def nonfinite(stored: CapturedSample, layout: ShardLayout) -> list[NonFinite]:
    """The layers of a sample with values that are not finite, by capture id."""
    ids = (*layout.aux_layer_ids, layout.final_layer_id)
    return [
        NonFinite(capture_id=ids[index], num_nan=nans, num_inf=infs)
        for index, nans, infs in nonfinite_counts(stored.aux_states, stored.final_states)
    ]


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` indices below `count`, evenly spread: 10 and 3 give 0, 3, 6."""
    wanted = min(count, wanted)
    return [index * count // wanted for index in range(wanted)]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
