"""The step `verify`: proves that a capture's stored states are what they claim to be.

Hashes and sizes are the store's business. Here every shard is read once: structure, keys, token ids and
masks against the dataset, finite values in all rows. Then the meaning: the target's final norm and LM head on
stored final states must give the tokens that the target generated, and stored layers must be nearest to their
own layer of a transformers forward. That forward is made for samples of shards from all over the capture,
which may be the work of several sessions, or (`verify.deep`) for samples of every shard; and each sample is
judged alone: many right ones hide no wrong one.

Samples with values that are not finite are left out of training, up to a limit; shards that are wrong are
condemned, and the next extract makes them anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from eagle3_core.capture.checks import check_file_names, content_problem, nonfinite, shard_problem, spread
from eagle3_core.capture.compare import (
    LayerDistances,
    NextTokenCounts,
    checked_rows,
    layer_distances,
    match_next_tokens,
)
from eagle3_core.capture.job import capture_layout
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.capture.verdict import (
    CheckedSample,
    ComparedSample,
    Findings,
    condemned_shards,
    first_failure,
)
from eagle3_core.config import RunConfig
from eagle3_core.contracts import BadSample, StepSpec, VerifyResult
from eagle3_core.errors import LostObjectError, ObjectStoreError, StoreError
from eagle3_core.identity import IMPORTED
from eagle3_core.step import Progress
from eagle3_core.store.condemned import condemn
from eagle3_core.store.dataset import Sample, read_dataset
from eagle3_core.store.files import write_atomic
from eagle3_core.store.files_ahead import FilesAhead
from eagle3_core.store.open import open_store
from eagle3_core.store.shards import CapturedSample, PlannedShard, ShardLayout, ShardReader, plan_shards
from eagle3_core.target.info import TargetInfo, inspect_target
from eagle3_core.target.weights import FinalHead

logger = logging.getLogger(__name__)

RESULT_FILE = "verification.json"


def run(spec: StepSpec, progress: Progress) -> VerifyResult:
    """Check a capture, condemn what is wrong with it, and write the verification.

    Raises:
        VerificationError: shards are not what the plan says, too many bad samples, states that do not
            reproduce the target's tokens, or a layer that is not the one it claims to be.
        StoreError: the capture is not complete, or the store cannot be reached.
    """
    started = time.monotonic()
    config, store = spec.config, open_store(spec.config)
    info = inspect_target(Path(spec.target_path))
    manifest = store.read(spec.inputs["capture"])
    layout = capture_layout(config, info)
    samples = read_dataset(store.fetch(spec.inputs["dataset"]))
    shards = plan_shards(samples, layout, int(config.capture.shard_bytes))
    check_file_names([entry.path for entry in manifest.files], shards)
    left_out = {
        key: (entry.path, f"quarantined: {reason}")
        for entry in manifest.files
        for key, reason in entry.facts.get("quarantined", {}).items()
    }
    imported = str(manifest.identity.get("engine", "")).startswith(IMPORTED)
    checker = CaptureChecker(config, info, samples, layout, len(shards), left_out, by_reference=imported)
    with FilesAhead(store, manifest, [shard.file_name for shard in shards]) as files:
        for shard in shards:
            try:
                with files.file(shard.file_name) as path:
                    checker.read(path, shard)
            except StoreError as error:
                if isinstance(error, ObjectStoreError) and not isinstance(error, LostObjectError):
                    raise
                checker.damaged(shard, str(error))
            message = f"{len(checker.findings.damaged)} bad shards, {len(checker.findings.bad)} bad samples"
            progress(shard.index + 1, len(shards), "shards", message, force=True)
    wrong = condemned_shards(checker.findings, config.verify)
    condemn(store, manifest, wrong)
    result = checker.findings.result(len(shards), len(samples) - len(left_out), wrong)
    failure = first_failure(checker.findings, config.verify)
    if failure is not None:
        failure.details = result.model_dump(mode="json")
        raise failure
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
    """Collects findings shard by shard.

    Args:
        config: the run's.
        info: the target.
        samples: all samples of the dataset, in order.
        layout: what the capture is meant to store.
        num_shards: shards of the whole capture.
        left_out: shard and reason of each sample that the capture has quarantined, by key.
        by_reference: a reference forward says which token must follow: somebody else made the answers.
    """

    def __init__(
        self,
        config: RunConfig,
        info: TargetInfo,
        samples: Sequence[Sample],
        layout: ShardLayout,
        num_shards: int,
        left_out: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        by_reference: bool = False,
    ) -> None:
        self._left_out = left_out
        self._config, self._info, self._samples, self._layout = config, info, samples, layout
        self._head = FinalHead(info, config.engine.device)
        self._greedy = config.data.generation.temperature == 0 and not by_reference
        self._reference: ReferenceModel | None = None
        self.findings = Findings(
            quarantined=[
                BadSample(key=key, shard=shard, problem=problem) for key, (shard, problem) in left_out.items()
            ]
        )
        self._to_compare = comparisons(config, num_shards)
        self._owed = 0
        if not self._to_compare:
            logger.warning("verify.reference_samples is 0: no layer is compared with a reference forward")

    def damaged(self, shard: PlannedShard, problem: str) -> None:
        """A shard that is not what it should be."""
        logger.warning("%s: %s", shard.file_name, problem)
        self.findings.damaged[shard.file_name] = problem

    def read(self, path: Path, shard: PlannedShard) -> None:
        """Check one shard.

        Raises:
            StoreError: it cannot be read, or a sample does not match its hash.
        """
        reader = ShardReader(path)
        planned = self._samples[shard.start : shard.end]
        expected = [sample for sample in planned if sample.key not in self._left_out]
        problem = shard_problem(reader, expected, self._layout)
        good: list[CapturedSample] = []
        bad: list[BadSample] = []
        for index, sample in enumerate(expected if problem is None else ()):
            stored = reader.sample(index)
            found = content_problem(stored, sample, self._layout)
            if found:
                problem = f"{sample.key} has {found}" if found[0].isdigit() else f"{sample.key}: {found}"
                break
            layers = nonfinite(stored, self._layout)
            if layers:
                counts = ", ".join(map(str, layers))
                bad.append(BadSample(key=sample.key, shard=shard.file_name, problem=counts, nonfinite=layers))
            else:
                good.append(stored)
        if problem is not None:
            self.damaged(shard, problem)
            return
        for each in bad:
            logger.warning("%s in %s: %s", each.key, each.shard, each.problem)
        self.findings.bad += bad
        self._check_meaning(good, shard)

    def _check_meaning(self, good: Sequence[CapturedSample], shard: PlannedShard) -> None:
        """Next tokens of some samples of a shard, evenly spread; of the longest answers also the layers."""
        self._owed += self._to_compare[shard.index]
        chosen = [good[i] for i in spread(len(good), max(self._config.verify.samples_per_shard, self._owed))]
        longest = sorted(chosen, key=lambda sample: -len(sample.final_rows))[: self._owed]
        self._owed -= len(longest)
        for sample, found in zip(chosen, self._next_tokens(chosen), strict=True):
            self.findings.checked.append(CheckedSample(sample.key, shard.file_name, found))
        for sample in longest:
            layers = self._layer_distances(sample)
            self.findings.compared.append(ComparedSample(sample.key, shard.file_name, layers))

    def _next_tokens(self, chosen: Sequence[CapturedSample]) -> list[NextTokenCounts]:
        states, expected = [], []
        for sample in chosen:
            rows = checked_rows(sample.loss_mask, sample.final_rows)
            states.append(sample.final_states[rows])
            expected.append(self._expected_tokens(sample, sample.final_rows[rows]))
        if not sum(map(len, states)):
            return [NextTokenCounts() for _ in chosen]
        tokens = torch.cat(expected)
        parts = [
            match_next_tokens(logits, tokens[part]) for part, logits in self._head.chunks(torch.cat(states))
        ]
        exact, ties = (
            torch.cat(rows).split([len(each) for each in expected]) for rows in zip(*parts, strict=True)
        )
        return list(map(NextTokenCounts.of, exact, ties))

    def _expected_tokens(self, sample: CapturedSample, rows: torch.Tensor) -> torch.Tensor:
        """The token that must follow each row: the generated one if decoding was greedy."""
        if self._greedy:
            return sample.input_ids[rows + 1].long()
        _, logits = self._reference_model().forward(sample.input_ids, ())
        return logits[rows].argmax(dim=-1).cpu()

    def _layer_distances(self, sample: CapturedSample) -> tuple[LayerDistances, ...]:
        """For each stored layer its distances to all layers of a reference forward."""
        ids = (*self._layout.aux_layer_ids, self._layout.final_layer_id)
        reference = [self._reference_model().all_states(sample.input_ids).cpu()]
        every_row = torch.arange(len(sample.input_ids))
        stored = [(states, every_row) for states in sample.aux_states.unbind(dim=1)]
        stored.append((sample.final_states, sample.final_rows))
        return tuple(
            layer_distances(capture_id, [states], [rows], reference)
            for capture_id, (states, rows) in zip(ids, stored, strict=True)
        )

    def _reference_model(self) -> ReferenceModel:
        if self._reference is None:
            target = self._config.target
            self._reference = ReferenceModel(
                self._info, target.dtype, self._config.engine.device, target.trust_remote_code
            )
        return self._reference


def comparisons(config: RunConfig, num_shards: int) -> Counter[int]:
    """How many samples of each shard are compared with a reference forward.

    `verify.reference_samples` in all, spread over the shards; of every shard if `verify.deep`.
    """
    count = config.verify.reference_samples
    if config.verify.deep:
        return Counter(dict.fromkeys(range(num_shards), count))
    return Counter(index * num_shards // count for index in range(count))
