"""The step `verify`: proves that a capture's stored states are what they claim to be.

Hashes and sizes are the store's business. Here every shard is read once: structure, keys, token ids and
masks against the dataset, finite values in all rows. Then the meaning: the target's final norm and LM head on
stored final states must give the tokens that the target generated, and stored layers must be nearest to their
own layer of a transformers forward. That forward is made for samples of shards from all over the capture,
which may be the work of several sessions, and each sample is judged alone: many right ones hide no wrong one.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from eagle3_core.capture.compare import (
    WRONG_LAYER_RATIO,
    LayerDistances,
    NextTokenCounts,
    checked_rows,
    layer_distances,
    match_next_tokens,
    nonfinite_counts,
    pooled,
)
from eagle3_core.capture.job import capture_layout
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.config import RunConfig
from eagle3_core.contracts import BadSample, StepSpec, VerifyResult
from eagle3_core.errors import StoreError, VerificationError
from eagle3_core.step import Progress
from eagle3_core.store.dataset import Sample, read_dataset
from eagle3_core.store.files import write_atomic
from eagle3_core.store.open import open_store
from eagle3_core.store.shards import (
    TORCH_DTYPES,
    CapturedSample,
    PlannedShard,
    ShardLayout,
    ShardReader,
    plan_shards,
)
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.weights import FinalHead

logger = logging.getLogger(__name__)

RESULT_FILE = "verification.json"
MAX_LISTED = 10


def run(spec: StepSpec, progress: Progress) -> VerifyResult:
    """Check a capture and write the verification.

    Raises:
        VerificationError: a shard's structure is wrong, too many bad samples, states that do not reproduce
            the target's tokens, or a layer that is not the one it claims to be.
        StoreError: the capture is not complete.
    """
    started = time.monotonic()
    config, store = spec.config, open_store(spec.config)
    info = inspect_target(Path(spec.target_path))
    capture, dataset = spec.inputs["capture"], spec.inputs["dataset"]
    manifest = store.read(capture)
    layout = capture_layout(config, info)
    samples = read_dataset(store.fetch(dataset))
    shards = plan_shards(samples, layout, int(config.capture.shard_bytes))
    check_file_names([entry.path for entry in manifest.files], shards)
    left_out = {
        key: (entry.path, f"quarantined: {reason}")
        for entry in manifest.files
        for key, reason in entry.facts.get("quarantined", {}).items()
    }
    checker = CaptureChecker(config, info, samples, layout, len(shards), left_out)
    for shard in shards:
        checker.read(store.folder(capture), shard)
        progress(shard.index + 1, len(shards), "shards", f"{len(checker.bad)} bad samples", force=True)
    result = checker.result(len(shards))
    with store.writer(spec.outputs["verification"], spec.run_id) as writer:
        path = writer.folder / RESULT_FILE
        write_atomic(path, json.dumps(result.model_dump(mode="json"), indent=1))
        writer.complete(
            [path],
            seconds=time.monotonic() - started,
            result=result.model_dump(mode="json"),
            capture_content=manifest.content,
        )
    return result


class CaptureChecker:
    """Collects findings shard by shard, and judges them at the end.

    Args:
        config: the run's.
        info: the target.
        samples: all samples of the dataset, in order.
        layout: what the capture is meant to store.
        num_shards: shards of the whole capture.
        left_out: shard and reason of each sample that the capture has quarantined, by key.
    """

    def __init__(
        self,
        config: RunConfig,
        info: TargetInfo,
        samples: Sequence[Sample],
        layout: ShardLayout,
        num_shards: int,
        left_out: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        self._left_out = left_out
        self._config, self._info, self._samples, self._layout = config, info, samples, layout
        self._head = FinalHead(info, config.engine.device)
        self._greedy = config.data.generation.temperature == 0
        self._reference: ReferenceModel | None = None
        self.bad: list[BadSample] = []
        self.damaged: list[str] = []
        self.next_tokens = NextTokenCounts()
        self.hopeless: list[str] = []
        self._for_layers: list[CapturedSample] = []
        count = config.verify.reference_samples
        self._from_shard = Counter(index * num_shards // count for index in range(count))
        self._owed = 0
        if not count:
            logger.warning("verify.reference_samples is 0: no layer is compared with a reference forward")

    def read(self, folder: Path, shard: PlannedShard) -> None:
        """Check one shard."""
        try:
            reader = ShardReader(folder / shard.file_name)
        except StoreError as error:
            self.damaged.append(str(error))
            return
        planned = self._samples[shard.start : shard.end]
        expected = [sample for sample in planned if sample.key not in self._left_out]
        problem = shard_problem(reader, expected, self._layout)
        if problem:
            self.damaged.append(f"{reader.path}: {problem}")
            return
        good = []
        for index, sample in enumerate(expected):
            stored = reader.sample(index)
            problem = sample_problem(stored, sample, self._layout)
            if problem:
                self.bad.append(BadSample(key=sample.key, shard=shard.file_name, problem=problem))
                logger.warning("%s in %s: %s", sample.key, shard.file_name, problem)
            else:
                good.append(stored)
        self._check_meaning(good, self._from_shard[shard.index])

    def result(self, num_shards: int) -> VerifyResult:
        """The outcome.

        Raises:
            VerificationError: see `run`.
        """
        self._judge_damage()
        self._judge_meaning()
        distances = self._layer_distances()
        self._judge_layers(distances)
        layers = [pooled(found).check() for found in distances if found]
        return VerifyResult(
            num_shards=num_shards,
            num_samples=len(self._samples) - len(self._left_out),
            num_rows_checked=self.next_tokens.rows,
            num_exact=self.next_tokens.exact,
            num_ties=self.next_tokens.ties,
            agreement=self.next_tokens.agreement,
            layers=layers,
            bad_samples=[*self.bad, *self._quarantined()],
        )

    def _quarantined(self) -> list[BadSample]:
        """Samples that the capture has left out; its own limit has judged their number."""
        return [
            BadSample(key=key, shard=shard, problem=problem)
            for key, (shard, problem) in self._left_out.items()
        ]

    def _check_meaning(self, good: Sequence[CapturedSample], num_for_layers: int) -> None:
        """Next tokens of some samples of a shard, evenly spread; keeps the longest answers for the layers."""
        chosen = [good[i] for i in spread(len(good), self._config.verify.samples_per_shard)]
        self._owed += num_for_layers
        longest = sorted(chosen, key=lambda sample: -len(sample.final_rows))[: self._owed]
        self._owed -= len(longest)
        self._for_layers += longest
        if not chosen:
            return
        states, expected = [], []
        for sample in chosen:
            rows = checked_rows(sample.loss_mask, sample.final_rows)
            states.append(sample.final_states[rows])
            expected.append(self._expected_tokens(sample, sample.final_rows[rows]))
        tokens = torch.cat(expected)
        parts = [
            match_next_tokens(logits, tokens[part]) for part, logits in self._head.chunks(torch.cat(states))
        ]
        if not parts:
            return
        exact, ties = (
            torch.cat(rows).split([len(each) for each in expected]) for rows in zip(*parts, strict=True)
        )
        for sample, found in zip(chosen, map(NextTokenCounts.of, exact, ties), strict=True):
            self.next_tokens += found
            if found.is_hopeless:
                self.hopeless.append(f"{sample.key}: {found.exact + found.ties} of {found.rows} rows")

    def _expected_tokens(self, sample: CapturedSample, rows: torch.Tensor) -> torch.Tensor:
        """The token that must follow each row: the generated one if decoding was greedy."""
        if self._greedy:
            return sample.input_ids[rows + 1].long()
        _, logits = self._reference_model().forward(sample.input_ids, ())
        return logits[rows].argmax(dim=-1).cpu()

    def _reference_model(self) -> ReferenceModel:
        if self._reference is None:
            target = self._config.target
            self._reference = ReferenceModel(
                self._info, target.dtype, self._config.engine.device, target.trust_remote_code
            )
        return self._reference

    def _layer_distances(self) -> list[list[LayerDistances]]:
        """For each stored layer its distances, sample by sample."""
        ids = (*self._layout.aux_layer_ids, self._layout.final_layer_id)
        found: list[list[LayerDistances]] = [[] for _ in ids]
        for sample in self._for_layers:
            reference = [self._reference_model().all_states(sample.input_ids).cpu()]
            every_row = torch.arange(len(sample.input_ids))
            stored = [(states, every_row) for states in sample.aux_states.unbind(dim=1)]
            stored.append((sample.final_states, sample.final_rows))
            for place, (states, rows) in enumerate(stored):
                found[place].append(layer_distances(ids[place], [states], [rows], reference))
        return found

    def _judge_damage(self) -> None:
        if self.damaged:
            raise VerificationError(
                f"{len(self.damaged)} shards are not what the plan says: {'; '.join(self.damaged)}",
                remedy="remove these files and run extract again: it remakes them alone",
            )
        limit = self._config.verify.max_bad_samples
        if len(self.bad) > limit:
            listed = "; ".join(f"{bad.key} in {bad.shard}: {bad.problem}" for bad in self.bad[:MAX_LISTED])
            raise VerificationError(
                f"{len(self.bad)} bad samples ({listed})",
                expected=f"at most {limit} (verify.max_bad_samples)",
                remedy="remove the shards that hold them and run extract again",
            )

    def _judge_meaning(self) -> None:
        counts, least = self.next_tokens, self._config.verify.min_next_token_agreement
        if not counts.rows:
            raise VerificationError(
                "no stored row could be checked for its next token", expected="answers of two tokens or more"
            )
        if counts.agreement < least:
            raise VerificationError(
                f"norm and LM head on the stored final states give the next token in {counts.agreement:.4f} "
                f"of {counts.rows:,} rows ({counts.exact:,} exact, {counts.ties:,} ties)",
                expected=f"at least {least} (verify.min_next_token_agreement)",
                remedy="the states are of another layer, another target or other tokens: extract again",
            )
        if self.hopeless:
            raise VerificationError(
                f"norm and LM head on the stored final states do not give the next tokens of "
                f"{len(self.hopeless)} samples ({'; '.join(self.hopeless[:MAX_LISTED])})",
                expected="most rows of every sample",
                remedy="their states are of other samples or layers: remove these shards and extract again",
            )

    def _judge_layers(self, distances: Sequence[Sequence[LayerDistances]]) -> None:
        wrong = [
            f"capture id {one.capture_id} is {one.median_error:.4f} from its own layer and "
            f"{one.nearest_wrong_median:.4f} from the nearest other (nearest is {one.nearest_id}) in the "
            f"sample {sample.key}"
            for found in distances
            for one, sample in zip(found, self._for_layers, strict=True)
            if not one.is_right
        ]
        if wrong:
            listed = "; ".join(wrong[:MAX_LISTED])
            raise VerificationError(
                f"stored layers are not the ones they claim to be ({len(wrong)} comparisons): {listed}",
                expected=f"the own layer nearest, any other {WRONG_LAYER_RATIO:g} times as far",
                remedy="the engine counts layers otherwise or computes otherwise: use another engine version",
            )


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


def sample_problem(stored: CapturedSample, sample: Sample, layout: ShardLayout) -> str | None:
    """Why a stored sample must not be trained on, or None."""
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
    nonfinite = nonfinite_counts(stored.aux_states, stored.final_states)
    if nonfinite:
        ids = (*layout.aux_layer_ids, layout.final_layer_id)
        return ", ".join(f"capture id {ids[i]} has {nans} NaN and {infs} Inf" for i, nans, infs in nonfinite)
    return None


def spread(count: int, wanted: int) -> list[int]:
    """At most `wanted` indices below `count`, evenly spread: 10 and 3 give 0, 3, 6."""
    wanted = min(count, wanted)
    return [index * count // wanted for index in range(wanted)]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
