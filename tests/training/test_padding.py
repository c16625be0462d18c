"""Tokens and samples without loss change neither the loss nor its gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import CapturedSample
from eagle3_core.target.info import TargetInfo
from eagle3_core.training import train
from eagle3_core.training.draft import build_draft, teacher_of, trained_parameters
from eagle3_core.training.loader import build_pack
from eagle3_core.training.loss import pack_loss, step_weights
from eagle3_core.training.ttt import ttt_forward
from tests.training.examples import make_config, make_samples, make_vocabulary, random_sample
from tests.training.runs import Quiet, records_of, spec_of

pytestmark = pytest.mark.engine
STEPS = 3
MASKS = ([0] * 4 + [1] * 9, [0, 0, 1, 1, 0, 0, 1], [0] * 6 + [1])


def padded(sample: CapturedSample) -> CapturedSample:
    """The sample at twice its length: ids and states of the padding are noise, its mask is zero."""
    tokens = len(sample.input_ids)
    generator = torch.Generator().manual_seed(tokens)
    noise = torch.randn(sample.aux_states.shape, generator=generator)
    return replace(
        sample,
        input_ids=torch.cat([sample.input_ids, sample.input_ids.flip(0)]),
        loss_mask=torch.cat([sample.loss_mask, torch.zeros_like(sample.loss_mask)]),
        aux_states=torch.cat([sample.aux_states, noise]),
    )


def longer(sample: Sample) -> Sample:
    """The sample with an answer that makes it 40 tokens, more than the smallest pack has room for."""
    more = 40 - len(sample)
    return replace(
        sample,
        input_ids=np.concatenate([sample.input_ids, np.full(more, 7, np.int32)]),
        loss_mask=np.concatenate([sample.loss_mask, np.ones(more, np.uint8)]),
    )


def loss_and_gradients(target: TargetInfo, samples: list[CapturedSample]) -> tuple[list[Tensor], list[int]]:
    """Loss, S_k and the gradients of all parameters, and n_k."""
    draft: Any = build_draft(make_config(), target, make_vocabulary(64, target.vocab_size))
    pack = build_pack(samples, STEPS)
    teacher, head = teacher_of(draft, torch.float32), draft.lm_head.weight
    weights = step_weights(pack.plan.counts, 0.8)
    hidden = ttt_forward(draft, pack, torch.float32)
    parts = pack_loss(hidden, head, pack.final_states, teacher, pack.plan, weights)
    parts.loss.backward()
    gradients = [parameter.grad for parameter in trained_parameters(draft).values()]
    assert all(gradient is not None for gradient in gradients)
    return [parts.loss.detach(), parts.step_sums, *gradients], parts.counts  # type: ignore[list-item]


@pytest.mark.parametrize("with_silent_sample", [False, True])
def test_loss_and_gradients_are_the_same_with_and_without_padding_to_twice_the_length(
    tiny_target: TargetInfo, with_silent_sample: bool
) -> None:
    samples = [random_sample(tiny_target, mask, f"s{i}", seed=i) for i, mask in enumerate(MASKS)]
    long = [padded(sample) for sample in samples]
    if with_silent_sample:
        long.insert(1, random_sample(tiny_target, [0] * 11, "silent", seed=9))
    plain, counts = loss_and_gradients(tiny_target, samples)
    same, same_counts = loss_and_gradients(tiny_target, long)
    assert same_counts == counts
    for ours, theirs in zip(same, plain, strict=True):
        assert torch.linalg.vector_norm(ours - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs)


def test_a_batch_of_samples_without_loss_in_the_middle_of_a_run_changes_nothing(
    tmp_path: Path, tiny_target: TargetInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample fills a pack, so that the silent ones are steps of their own."""
    samples = [longer(sample) for sample in make_samples(tiny_target, num_train=8, num_heldout=2)]
    silent = {sample.key for sample in samples[2:4]}
    for sample in samples[2:4]:
        sample.loss_mask[:] = 0
    monkeypatch.setattr("eagle3_core.training.loader._without_loss", lambda sample: None)
    settings = {"pack_tokens": 32, "num_epochs": 2}
    spec = spec_of(tmp_path, tiny_target, samples, train=settings)
    result = train.run(spec, Quiet())  # type: ignore[arg-type]
    steps, left_out = records_of(spec, "step"), records_of(spec, "skipped")
    assert result.num_steps == 16
    assert result.num_empty_packs == len(left_out) == 4
    assert {key for record in left_out for key in record["samples"]} == silent
    assert any(steps[0]["step"] < record["step"] < steps[-1]["step"] for record in left_out)
    assert np.isfinite([record["loss"] for record in steps]).all()
    evaluation = records_of(spec, "evaluation")[0]
    first_epoch = [record for record in steps if record["epoch"] == 0]
    sums = sum(np.array(r["loss_by_step"]) * np.array(r["loss_rows"]) for r in first_epoch)
    rows = sum(np.array(r["loss_rows"]) for r in first_epoch)
    expected = step_weights([1] * len(rows), spec.config.train.step_loss_decay) @ (sums / rows)
    assert evaluation["train_loss"] == pytest.approx(expected, rel=1e-6)
