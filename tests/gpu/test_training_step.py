"""The training step on a GPU: each kernel against its eager twin, the whole step against fp32 on the CPU.

`python -m pytest -m gpu tests/gpu/test_training_step.py` where torch has CUDA and speculators is installed.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle3_core.sections import LossConfig
from eagle3_core.store.shards import CapturedSample
from eagle3_core.training import attention, heads, pointwise
from eagle3_core.training.attention import merged_attention
from eagle3_core.training.first_block import FirstBlock, flash_is_usable
from eagle3_core.training.heads import BlockMemory, Turn
from eagle3_core.training.loader import build_pack
from eagle3_core.training.loss import Teacher, chunk_losses, pack_loss, step_weights
from eagle3_core.training.matrices import product
from eagle3_core.training.pointwise import Routes
from eagle3_core.training.row_index import index_rows
from eagle3_core.training.rows import plan_rows
from eagle3_core.training.ttt import ttt_forward

pytestmark = [pytest.mark.engine, pytest.mark.gpu]
DTYPES = [torch.float32, torch.bfloat16]
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def _seed() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    torch.manual_seed(0)


def _near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Equal but for the rounding of `dtype`; NaN, as poison leaves it, is never near."""
    distance = (found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().norm().cpu()
    assert distance < (1e-5 if dtype == torch.float32 else 6e-3), float(distance)


def _poison(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def _routes(rows: int, loss: bool, after: bool) -> Routes:
    """Every second row has a loss, every third goes on, as asked for."""
    chosen: list[Tensor | None] = []
    for wanted, stride in ((loss, 2), (after, 3)):
        index = torch.arange(0, rows, stride)
        places = torch.full((rows,), -1).index_copy_(0, index, torch.arange(len(index)))
        chosen += [index, places] if wanted else [None, None]
    return Routes(*chosen)


def _on_gpu(routes: Routes) -> Routes:
    fields = (routes.loss, routes.loss_at, routes.after, routes.after_at)
    return Routes(*[None if x is None else x.to(GPU) for x in fields])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (37, 4096), (2100, 576), (5, 7168), (0, 64)])
@pytest.mark.parametrize(
    ("with_delta", "loss", "after"), [(0, 0, 0), (1, 0, 0), (1, 1, 1), (1, 0, 1), (1, 1, 0)]
)
def test_norm(dtype: torch.dtype, rows: int, width: int, with_delta: int, loss: int, after: int) -> None:
    from eagle3_core.training.kernels import norm

    routes = _routes(rows, bool(loss), bool(after))
    states, weight = torch.randn(rows, width), torch.rand(width)
    num_loss = rows if routes.loss is None else len(routes.loss)
    num_after = rows if routes.after is None else len(routes.after)
    grad_after, grad_normal = torch.randn(num_after, width), torch.randn(num_loss, width).to(dtype)
    delta = torch.randn(rows, width).to(dtype) if with_delta else None
    results = []
    for on_gpu in (False, True):
        here = _on_gpu(routes) if on_gpu else routes
        device = GPU if on_gpu else torch.device("cpu")
        given = None if delta is None else delta.to(device, copy=True)
        out = _poison(num_loss, width, dtype=dtype).to(device)
        forward, backward = (
            (norm.forward, norm.backward) if on_gpu else (pointwise._norm_forward, pointwise._norm_backward)
        )
        total, rate, following = forward(states.to(device), given, weight.to(device), 1e-5, out, here)
        found = [out, total.clone(), following.clone()]
        for a, n in ((None, grad_normal), (grad_after, grad_normal), (grad_after, None)):
            a, n = (None if x is None else x.to(device) for x in (a, n))
            grads = backward(a, n, total, rate, weight.to(device), given, here)
            found += [*grads, *([] if given is None else [given.clone()])]
        results.append(found)
    for wanted, found in zip(*results, strict=True):
        if wanted.numel() and wanted.any():
            _near(found, wanted, wanted.dtype)
        else:
            assert not found.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (33, 14336), (17, 1536), (0, 8)])
def test_gate(dtype: torch.dtype, rows: int, width: int) -> None:
    both, gradient = torch.randn(rows, 2 * width).to(dtype), torch.randn(rows, width).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        leaf = both.to(device, copy=True).requires_grad_()
        out = pointwise.gated(leaf * 1, _poison(rows, width, dtype=dtype).to(device))
        (grad,) = torch.autograd.grad(out, leaf, gradient.to(device))
        results.append((out.detach(), grad))
    for wanted, found in zip(*results, strict=True):
        if rows:
            _near(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("number", "depth"), [(32, 128), (9, 64), (3, 10), (64, 112), (1, 64)])
@pytest.mark.parametrize(
    ("added", "turned", "scattered"), [(1, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 0)]
)
def test_rotation(
    dtype: torch.dtype, number: int, depth: int, added: int, turned: int, scattered: int
) -> None:
    rows, size = 19, number * depth
    both = torch.randn(rows, 2, number, depth).to(dtype)
    part, places = torch.randn(31, 2 * size).to(dtype)[:, size:], torch.randperm(23)[:rows]
    source = torch.randperm(31)[:rows]
    turn = Turn(torch.randn(50, depth), torch.randn(50, depth), torch.randint(0, 50, (rows,)))
    gradient, sums = torch.randn(23, number, depth), torch.randn(31, 2 * size)
    results = []
    for device in ("cpu", "cuda"):
        here = Turn(turn.cos.to(device), turn.sin.to(device), turn.positions.to(device)) if turned else None
        at, index = places.to(device) if scattered else None, source.to(device) if added else None
        out = torch.zeros(23, number, depth, dtype=dtype, device=device)
        heads.rotate(both.to(device)[:, 1], part.to(device) if added else None, index, here, out, at)
        back, total = _poison(rows, 2, number, depth, dtype=dtype).to(device), sums.to(device, copy=True)
        half = total[:, size:] if added else None
        heads.rotate_back(gradient.to(device), at, here, back[:, 1], half, index)
        assert back[:, 0].isnan().all()
        results.append((out, back[:, 1], total))
    for wanted, found in zip(*results, strict=True):
        _near(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("number", "groups", "depth"), [(32, 8, 128), (9, 3, 64), (4, 4, 16), (64, 8, 112)])
@pytest.mark.parametrize("later", [1, 2, 6])
@pytest.mark.parametrize("spread_out", [False, True])
def test_diagonal_terms(
    dtype: torch.dtype, number: int, groups: int, depth: int, later: int, spread_out: bool
) -> None:
    count, rows, size = 21, torch.randperm(39)[:21], 27 if spread_out else 21
    places = torch.randperm(size)[:count].sort().values if spread_out else None
    first, queries, grad_queries = torch.randn(3, size, number, depth).to(dtype)
    grad_out = torch.randn(count, number, depth).to(dtype)
    keys, values = torch.randn(2, later, 40, groups, depth).to(dtype)
    keys[:, 39], values[:, 39] = torch.nan, torch.nan  # rows that no step computes may hold anything
    lse, sums = torch.randn(number, size), torch.randn(2, later, 40, groups, depth)
    results = []
    for device in ("cpu", "cuda"):
        data = [x.to(device) for x in (queries, keys, values, rows)]
        at = None if places is None else places.to(device)
        out = _poison(count, number, depth, dtype=dtype).to(device)
        both = first.to(device, copy=True), lse.to(device, copy=True)
        attention.merge(*both, *data, at, 0.2, out)
        grads = grad_queries.to(device, copy=True), *sums.to(device, copy=True)
        merged = results[0][1 if spread_out else 0].to(device) if results else both[0] if spread_out else out
        total = results[0][2].to(device) if results else both[1]
        attention.merge_backward(grad_out.to(device), *data, at, merged, total, 0.2, *grads)
        results.append((out, *both, *grads))
    kinds = [dtype, dtype, torch.float32, dtype, torch.float32, torch.float32]
    for wanted, found, kind in zip(*results, kinds, strict=True):
        _near(found, wanted, kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 5), (40, 32_000), (9, 4097), (0, 64)])
@pytest.mark.parametrize("kind", ["kl", "cross_entropy", "acceptance"])
def test_loss_of_rows(dtype: torch.dtype, rows: int, size: int, kind: str) -> None:
    logits, wanted = 3 * torch.randn(rows, size).to(dtype), 3 * torch.randn(7, size).to(dtype)
    label, weight = torch.randint(0, 7, (rows,)), torch.rand(rows)
    data = (wanted, label, weight)
    expected = chunk_losses(LossConfig(kind=kind), logits.clone(), *data, True)
    found = chunk_losses(LossConfig(kind=kind), logits.to(GPU), *[x.to(GPU) for x in data], True)
    silent = chunk_losses(LossConfig(kind=kind), logits.to(GPU), *[x.to(GPU) for x in data], False)
    assert silent[2] is None
    if rows:
        _near(found[0], expected[0], torch.float32)
        _near(silent[0], expected[0], torch.float32)
        assert torch.equal(logits.gather(1, found[1].cpu()[:, None])[:, 0], logits.max(-1).values)
        assert found[2] is not None
        assert expected[2] is not None
        _near(found[2], expected[2], dtype)


def test_products_are_summed_in_fp32() -> None:
    gradient, inputs = torch.randn(2, 3000, 64).to(torch.bfloat16)
    wide = gradient.double().T @ inputs.double()
    found = product(gradient.to(GPU), inputs.to(GPU), None)
    _near(found, wide, torch.float32)
    _near(product(gradient.to(GPU), inputs.to(GPU), found), 2 * wide, torch.float32)


MASKS = {
    "late": [[0] * 300 + [1] * 200, [0] * 40 + [1] * 30],
    "turns": [([0] * 50 + [1] * 30) * 4, [0] * 8 + [1] * 5 + [0] * 60],
    "everything": [[0] + [1] * 150, [0, 1], [0, 1, 1]],
    "one without loss": [[0] * 90, [0] * 5 + [1] * 9, [0] * 33],
    "last row only": [[0] * 20 + [1]],
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("window", [None, 16])
def test_attention_of_all_steps(masks: list[list[int]], window: int | None) -> None:
    assert flash_is_usable(GPU, torch.bfloat16, 64)
    lengths = [len(mask) - 1 for mask in masks]
    plan = plan_rows(lengths, np.array([bit for mask in masks for bit in mask[1:]], bool), 4)
    steps, total = len(plan.steps), sum(lengths)
    keys, values = torch.randn(2, steps, total, 2, 64).to(torch.bfloat16)
    results = []
    queries = [torch.randn(len(step.rows), 6, 64).to(torch.bfloat16) for step in plan.steps]
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        index = index_rows(plan, torch.device(device))
        memory = BlockMemory(steps, total, 2, 64, dtype, torch.device(device))
        memory.keys.copy_(keys)
        memory.values.copy_(values)
        found = []
        for number, (step, query) in enumerate(zip(index.steps, queries, strict=False)):
            block = FirstBlock(step.first.runs, step.first.hull, window)
            places, size = block.places, 0 if block.hull is None else block.hull.size
            leaf = attention.spread(query.to(device, dtype), places, size).requires_grad_()
            out = merged_attention(leaf, memory, step.rows, number, block, 0.2)
            weights = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
            (grad,) = torch.autograd.grad((out.float() * weights).sum(), leaf)
            found += [out, grad if places is None else grad[places]]
        results.append([*found, *memory.grads])
    for found, wanted in zip(results[1], results[0], strict=True):
        distance = (found.float().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-6)
        assert distance < 0.012, float(distance)


def _samples(masks: list[list[int]], hidden: int, vocabulary: int) -> list[CapturedSample]:
    samples = []
    for number, values in enumerate(masks):
        mask = torch.tensor(values, dtype=torch.uint8)
        rows = 1 + mask[1:].nonzero().squeeze(-1)
        samples.append(
            CapturedSample(
                key=str(number),
                input_ids=torch.randint(0, vocabulary, (len(mask),), dtype=torch.int32),
                loss_mask=mask,
                aux_states=torch.randn(len(mask), 3, hidden).to(torch.bfloat16),
                final_states=torch.randn(len(rows), hidden).to(torch.bfloat16),
                final_rows=rows,
            )
        )
    return samples


def _draft(flags: dict[str, Any], heads: int, groups: int) -> Any:
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        vocab_size=500, hidden_size=192, intermediate_size=352, num_hidden_layers=flags.pop("num_layers", 1),
        num_attention_heads=heads, num_key_value_heads=groups, head_dim=64,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=333,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    draft = Eagle3DraftModel(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.05 + (1.0 if parameter.ndim == 1 else 0.0))
    return draft


def _step(draft: Any, samples: list[CapturedSample], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The loss and the gradients of one step, the LM head trained too."""
    draft = copy.deepcopy(draft).to(device)
    draft.lm_head.weight.requires_grad_(True)
    pack = build_pack(samples, 4).to(torch.device(device))
    head = draft.verifier_lm_head.weight.detach().to(dtype)
    teacher = Teacher(draft.verifier_norm.weight.detach(), 1e-6, head)
    hidden = ttt_forward(draft, pack, dtype)
    weights = step_weights(pack.plan.counts, 0.8)
    parts = pack_loss(hidden, draft.lm_head.weight, pack.final_states, teacher, pack.plan, weights)
    parts.loss.backward()
    found = {name: p.grad.cpu() for name, p in draft.named_parameters() if p.grad is not None}
    return {"loss": parts.loss.detach().cpu(), "sums": parts.step_sums.cpu(), **found}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_before_residual": True, "fc_norm": True}, {"norm_output": True}, {"num_layers": 2}],
    ids=["defaults", "norms", "norm_output", "two layers"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_equals_fp32_on_the_cpu(
    masks: list[list[int]], flags: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_core.training.loss.CHUNK_BYTES", 400 * 333 * 2)
    draft, samples = _draft(dict(flags), 6, 2), _samples(masks, 192, 500)
    wanted = _step(draft, samples, "cpu", torch.float32)
    found = _step(draft, samples, "cuda", dtype)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        distance = float((found[name] - value).norm() / value.norm())
        assert distance < (1e-4 if dtype == torch.float32 else 0.03), (name, distance)


def _num_compiled() -> int:
    from eagle3_core.training.kernels import diagonal, gate, norm, rotary, rows_loss

    modules = (diagonal, gate, norm, rotary, rows_loss)
    kernels = [kernel for module in modules for kernel in vars(module).values() if hasattr(kernel, "warmup")]
    return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)


def test_packs_of_any_size_compile_no_kernel_again() -> None:
    draft = _draft({}, 6, 2)
    generator = np.random.default_rng(0)

    def masks(share: float) -> list[list[int]]:
        return [
            [0, *(int(draw < share) for draw in generator.random(length))]
            for length in generator.integers(2, 90, generator.integers(1, 5))
        ]

    for share in (1.0, 0.5, 0.5):
        _step(draft, _samples([*masks(share), [0, 1, 1]], 192, 500), "cuda", torch.bfloat16)
    compiled = _num_compiled()
    assert compiled > 0
    for share in np.linspace(0.1, 1.0, 16):
        _step(draft, _samples([*masks(share), [0, 1, 1]], 192, 500), "cuda", torch.bfloat16)
    assert _num_compiled() == compiled
