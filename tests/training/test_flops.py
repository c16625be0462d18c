"""Operations of a pack against a count by torch, and peaks by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle3_core.target.info import TargetInfo
from eagle3_core.training.draft import build_draft, teacher_of
from eagle3_core.training.flops import DraftShape, pack_work, peak_flops, training_flops
from eagle3_core.training.loader import build_pack
from eagle3_core.training.rows import plan_rows
from eagle3_core.training.ttt import ttt_forward
from tests.training.examples import make_config, make_vocabulary, random_sample

pytestmark = pytest.mark.engine
PROJECTED = ("fusion", "tokens", "layers", "head")
TINY = DraftShape(
    hidden=2, intermediate=3, heads=1, key_heads=1, head_dim=2, num_layers=1, vocabulary=5, num_aux=3
)


def test_one_step_of_one_document_by_hand() -> None:
    """Three rows, loss on the last two: all three give keys, two are computed; H = 2, I = 3, D = 5."""
    plan = plan_rows([3], np.array([False, True, True]), 1)
    fusion = 2 * (2 * 3 * 6 * 2)
    keys = 2 * 3 * 2 * 4
    queries = 2 * 2 * (2 * 2 + 2 * 2)
    tokens = 2 * (keys + 2 * 2 * 2 * 2)
    mlp = 3 * (2 * 2 * 2 * 3)
    pairs = 2 + 3
    head = 2 * (2 * 2 * 2 * 5)
    teacher = 2 * 2 * 2 * 5
    wanted = fusion + tokens + 3 * (keys + queries + mlp + 4 * pairs * 2) + head + teacher
    assert training_flops(plan, TINY) == wanted
    assert training_flops(plan, replace(TINY, trains_head=True)) == wanted + head / 2


def test_a_window_leaves_out_the_pairs_beyond_it() -> None:
    """Five rows, loss on the last three: they see 3, 4 and 5 keys, with a window of four 3, 4 and 4."""
    plan = plan_rows([5], np.array([False, False, True, True, True]), 1)
    wide, narrow = (training_flops(plan, replace(TINY, windows=(window,))) for window in (None, 4))
    assert wide == training_flops(plan, TINY)
    assert wide - narrow == 3 * (4 * 1 * 2)
    assert wide - training_flops(plan, replace(TINY, windows=(2,))) == 3 * (4 * (1 + 2 + 3) * 2)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_forward_pass_is_what_torch_counts(tiny_target: TargetInfo, layers: int) -> None:
    """Products of the draft's weights and of its head: torch does not see into the CPU's attention."""
    config = make_config(tiny_target.path, draft={"num_layers": layers})
    draft = build_draft(config, tiny_target, make_vocabulary(64, tiny_target.vocab_size))
    samples = [random_sample(tiny_target, [0] * 4 + [1] * length, seed=length) for length in (5, 9)]
    pack = build_pack(samples, 3)
    head = teacher_of(draft, torch.float32).head
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        for states in ttt_forward(draft, pack, torch.float32):
            states @ head.T
    counts = counted.get_flop_counts()["Global"]
    work = {kind.name: kind.forward for kind in pack_work(pack.plan, DraftShape.of(draft))}
    assert counts[torch.ops.aten.mm] == sum(work[name] for name in PROJECTED)


def test_the_peak_of_a_device_is_known_by_its_name() -> None:
    assert peak_flops("NVIDIA H200", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA H20", "bfloat16") == 148e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    assert peak_flops("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_flops("NVIDIA L4", "bfloat16") == 121e12
    assert peak_flops("NVIDIA A10", "bfloat16") == 125e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("cpu", "bfloat16") is None
