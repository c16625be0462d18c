"""Our training computation against the forward of speculators 0.9.0, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3_core.store.shards import CapturedSample
from eagle3_core.target.info import TargetInfo
from eagle3_core.training.draft import build_draft, draft_config, teacher_of, trained_parameters
from eagle3_core.training.loader import build_pack
from eagle3_core.training.loss import LossParts, pack_loss, step_weights
from eagle3_core.training.ttt import ttt_forward
from tests.training.examples import make_config, make_vocabulary, random_sample, speculators_forward

pytestmark = pytest.mark.engine
TOLERANCE = 1e-5
STEPS, DECAY = 3, 0.8
LATE_MASKS = (
    [0] * 7 + [1] * 12,
    [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0],
    [0] * 5 + [1] * 6 + [0] * 9,
)
"""Documents whose first T - 1 rows (tokens 1 and 2) carry no loss; the second has two answers and a tail."""
FLAGS: tuple[dict[str, Any], ...] = (
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True},
    {"train_lm_head": True},
    {"vocab_size": None},
    {"num_layers": 3},
)


def _draft(target: TargetInfo, flags: dict[str, Any]) -> Any:
    config = make_config(draft=flags)
    size = config.draft.vocab_size or target.vocab_size
    draft = build_draft(config, target, make_vocabulary(size, target.vocab_size))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # away from initial values, so that no gradient is zero by symmetry
        for parameter in trained_parameters(draft).values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return draft


def _ours(draft: Any, samples: Sequence[CapturedSample], steps: int = STEPS) -> LossParts:
    pack = build_pack(samples, steps)
    hidden = ttt_forward(draft, pack, torch.float32)
    weights = step_weights(pack.plan.counts, DECAY)
    return pack_loss(
        hidden,
        draft.lm_head.weight,
        pack.final_states,
        teacher_of(draft, torch.float32),
        pack.plan,
        weights,
    )


def _gradients(draft: Any, loss: Tensor) -> dict[str, Tensor]:
    draft.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in trained_parameters(draft).items()}


def _samples(target: TargetInfo, masks: Sequence[list[int]]) -> list[CapturedSample]:
    return [random_sample(target, mask, f"s{i}", seed=i) for i, mask in enumerate(masks)]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: ",".join(flags) or "defaults")
def test_loss_and_gradients_equal_speculators_on_a_pack(tiny_target: TargetInfo, flags: dict) -> None:
    draft, samples = _draft(tiny_target, flags), _samples(tiny_target, LATE_MASKS)
    expected = speculators_forward(draft, samples, STEPS, DECAY)
    expected_gradients = _gradients(draft, expected)
    found = _ours(draft, samples).loss
    found_gradients = _gradients(draft, found)
    assert abs(found.item() - expected.item()) / expected.item() < TOLERANCE
    assert found_gradients.keys() == expected_gradients.keys()
    for name, wanted in expected_gradients.items():
        assert wanted.norm() > 0, name
        assert (found_gradients[name] - wanted).norm() / wanted.norm() < TOLERANCE, name


@pytest.mark.parametrize(("kind", "window"), [("qwen3", None), ("llama", 3), ("qwen3", 5)])
def test_qwen3_blocks_and_sliding_windows_equal_those_of_speculators(
    tiny_target: TargetInfo, kind: str, window: int | None
) -> None:
    draft, samples = _block_draft(tiny_target, kind, window), _samples(tiny_target, LATE_MASKS)
    expected = speculators_forward(draft, samples, STEPS, DECAY)
    wanted = _gradients(draft, expected)
    found = _ours(draft, samples).loss
    assert found.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    for name, gradient in _gradients(draft, found).items():
        assert (gradient - wanted[name]).norm() / wanted[name].norm() < TOLERANCE, name


def _block_draft(target: TargetInfo, kind: str, window: int | None) -> Any:
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import LlamaConfig, Qwen3Config

    config = draft_config(make_config(), target)
    layer = config.transformer_layer_config.to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        layer.pop(name, None)
    kinds = {"layer_types": ["full_attention" if window is None else "sliding_attention"]}
    made = (Qwen3Config if kind == "qwen3" else LlamaConfig)(**layer | kinds | {"sliding_window": window})
    made.sliding_window, made._attn_implementation = window, "eager"
    config.transformer_layer_config = made
    draft = Eagle3DraftModel(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            base = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(base + 0.1 * torch.randn(parameter.shape, generator=generator))
    return draft


def test_a_document_that_starts_with_loss_is_kept_apart_from_its_neighbours(tiny_target: TargetInfo) -> None:
    draft = _draft(tiny_target, {})
    samples = _samples(tiny_target, ([0] * 4 + [1] * 8, [1] * 9, [0] + [1] * 6))
    packed = _ours(draft, samples)
    singles = [_ours(draft, [sample]) for sample in samples]
    for step in range(STEPS):
        total = sum(single.step_sums[step].item() for single in singles)
        assert packed.counts[step] == sum(single.counts[step] for single in singles)
        assert packed.step_sums[step].item() == pytest.approx(total, rel=TOLERANCE)

    # Speculators on each document alone gives S_k / n_k step by step: weighted by count, it is ours.
    expected = 0.0
    for step in range(STEPS):
        until = [speculators_forward(draft, [sample], step + 1, 1.0).item() for sample in samples]
        before = [speculators_forward(draft, [sample], step, 1.0).item() for sample in samples]
        means = [high - low for high, low in zip(until, before, strict=True)]
        counts = [single.counts[step] for single in singles]
        mean = sum(m * n for m, n in zip(means, counts, strict=True)) / sum(counts)
        expected += DECAY**step * mean
    assert packed.loss.item() == pytest.approx(expected, rel=TOLERANCE)

    # Its packed forward compares the last rows of a document with the first labels of the next one.
    ours = _gradients(draft, _ours(draft, samples).loss)["fc.weight"]
    crossed = _gradients(draft, speculators_forward(draft, samples, STEPS, DECAY))["fc.weight"]
    assert (crossed - ours).norm() / ours.norm() > 1000 * TOLERANCE


def test_padding_without_loss_changes_nothing(tiny_target: TargetInfo) -> None:
    draft = _draft(tiny_target, {})
    sample = random_sample(tiny_target, [0] * 4 + [1] * 8)
    tail = random_sample(tiny_target, [0] * 12, seed=9)
    padded = CapturedSample(
        key="padded",
        input_ids=torch.cat([sample.input_ids, tail.input_ids]),
        loss_mask=torch.cat([sample.loss_mask, tail.loss_mask]),
        aux_states=torch.cat([sample.aux_states, tail.aux_states]),
        final_states=sample.final_states,
        final_rows=sample.final_rows,
    )
    plain, longer = _ours(draft, [sample]), _ours(draft, [padded])
    assert longer.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    assert longer.counts == plain.counts


def test_bfloat16_stays_near_fp32(tiny_target: TargetInfo) -> None:
    draft, samples = _draft(tiny_target, {}), _samples(tiny_target, LATE_MASKS)
    exact = _ours(draft, samples)
    pack = build_pack(samples, STEPS)
    hidden = ttt_forward(draft, pack, torch.bfloat16)
    weights = step_weights(pack.plan.counts, DECAY)
    teacher = teacher_of(draft, torch.bfloat16)
    rough = pack_loss(hidden, draft.lm_head.weight, pack.final_states, teacher, pack.plan, weights)
    assert rough.loss.item() == pytest.approx(exact.loss.item(), rel=0.02)
