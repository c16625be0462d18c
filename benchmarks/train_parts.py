"""Times the parts of our training step one by one on a GPU, with alternatives side by side.

`python -m benchmarks.train_parts --shape llama-8b` prints milliseconds (median of repeats) and rates. It
answers what to do next about the step; `benchmarks.train_step --profile` says where its time goes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.train_sides import SHAPES, Shape
from eagle3_core.sections import LossConfig
from eagle3_core.training import attention, first_block
from eagle3_core.training.first_block import Hull
from eagle3_core.training.heads import Turn
from eagle3_core.training.pointwise import EVERYWHERE

GPU = torch.device("cuda")
STEPS = 7
Call = Callable[..., Any]


def show(name: str, call: Call, *given: Any, flops: float = 0.0, moved: float = 0.0) -> None:
    """One line; a part that fails says why, and the rest goes on."""
    from triton.testing import do_bench

    try:
        spent = do_bench(lambda: call(*given), warmup=10, rep=40, return_mode="median")
    except Exception as error:
        print(f"{name:56s} failed: {str(error).splitlines()[0][:90]}", flush=True)
        return
    rate = f"{flops / spent / 1e9:7.0f} TFLOP/s" if flops else ""
    rate += f"{moved / spent / 1e9:8.2f} TB/s" if moved else ""
    print(f"{name:56s} {spent:8.3f} ms {rate}", flush=True)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=dtype)


def wide(*shape: int) -> Tensor:
    return draw(*shape, dtype=torch.float32)


def ceilings() -> None:
    """What the card reaches: a copy and a large product."""
    source = draw(1 << 30)
    show("copy of 2 GiB", torch.empty_like(source).copy_, source, moved=2.0 * source.nbytes)
    show("product 8192 x 8192 x 8192", torch.mm, draw(8192, 8192), draw(8192, 8192), flops=2 * 8192.0**3)


def products(shape: Shape, rows: int) -> None:
    """Every product of a step, and ways to sum weight gradients over steps."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q, k, v": (shape.hidden, query + 2 * key),
        "o": (query, shape.hidden),
        "gate, up": (shape.hidden, 2 * shape.intermediate),
        "down": (shape.intermediate, shape.hidden),
        "LM head": (shape.hidden, shape.draft_vocab),
    }
    for name, (inner, outer) in sizes.items():
        flops = 2.0 * rows * inner * outer
        x, w, y = draw(rows, inner), draw(outer, inner), draw(rows, outer)
        show(f"{name} forward, {rows} rows", torch.mm, x, w.T, flops=flops)
        show(f"{name} gradient by input", torch.mm, y, w, flops=flops)
        if name == "LM head":
            continue
        show(f"{name} gradient by weight, fp32", _by_weight, y, x, flops=flops)
        del x, y
        x, y = draw(STEPS * rows, inner), draw(STEPS * rows, outer)
        show(f"{name} of {STEPS} steps at once, fp32", _by_weight, y, x, flops=STEPS * flops)
        show(f"{name} of {STEPS} steps at once, bf16", torch.mm, y.T, x, flops=STEPS * flops)
        show(f"{name} one by one, summed in fp32", _one_by_one, y, x, rows, flops=STEPS * flops)
        del x, y, w


def _by_weight(gradient: Tensor, inputs: Tensor) -> Tensor:
    return torch.mm(gradient.T, inputs, out_dtype=torch.float32)


def _one_by_one(gradient: Tensor, inputs: Tensor, rows: int) -> Tensor:
    total = _by_weight(gradient[:rows], inputs[:rows])
    for g, x in zip(gradient.split(rows)[1:], inputs.split(rows)[1:], strict=True):
        torch.addmm(total, g.T, x, out_dtype=torch.float32, out=total)
    return total


def first_blocks(shape: Shape, share: float) -> None:
    """torch's flash attention over the first block."""
    documents, length = shape.documents, shape.document_tokens
    count = round(length * share)
    h, g, d = shape.heads, shape.kv_heads, shape.head_dim
    q, grad = draw(documents * count, h, d), draw(documents * count, h, d)
    k, v = draw(documents * length, g, d), draw(documents * length, g, d)
    ends = [
        torch.arange(0, documents * size + 1, size, device=GPU, dtype=torch.int32) for size in (count, length)
    ]
    rest = Hull(None, len(q), ends[0], ends[1], count, length), None, d**-0.5
    out, lse = first_block._flash_forward(q, k, v, *rest)
    flops = 2.0 * documents * count * (2 * length - count + 1) * h * d
    name = f"{share:.0%} of rows"
    show(f"flash forward, {name}", first_block._flash_forward, q, k, v, *rest, flops=flops)
    show(
        f"flash backward, {name}", first_block._flash_backward, grad, q, k, v, out, lse, *rest,
        flops=2.5 * flops,
    )  # fmt: skip


def norms(shape: Shape, rows: int) -> None:
    """Norm kernels, by warps and programs."""
    from eagle3_core.training.kernels import norm

    states, after = wide(rows, shape.hidden), wide(rows, shape.hidden)
    delta, out, weight = draw(rows, shape.hidden), draw(rows, shape.hidden), wide(shape.hidden)
    size, chosen = rows * shape.hidden, norm._warps
    for warps in (4, 8, 16):
        norm._warps = lambda _, warps=warps: warps  # type: ignore[assignment]
        given = states, delta, weight, 1e-5, out, EVERYWHERE
        show(f"norm forward, {warps} warps", norm.forward, *given, moved=12.0 * size)
        total, rate, _ = norm.forward(*given)
        for programs in (264, 528, 1024):
            norm.PROGRAMS = programs
            show(
                f"norm backward, {warps} warps, {programs} programs", norm.backward, after, out, total, rate,
                weight, delta, EVERYWHERE, moved=16.0 * size,
            )  # fmt: skip
    norm._warps = chosen


def gates(shape: Shape, rows: int) -> None:
    """Gate kernels, by block size."""
    from eagle3_core.training.kernels import gate

    both, inner = draw(rows, 2 * shape.intermediate), draw(rows, shape.intermediate)
    for gate.BLOCK, gate.WARPS in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        size = f"{gate.BLOCK} by {gate.WARPS}"
        show(f"gate forward, {size}", gate.forward, both, inner, moved=6.0 * inner.numel())
        show(f"gate backward, {size}", gate.backward, both, inner, moved=10.0 * inner.numel())


def rotations(shape: Shape, rows: int) -> None:
    """Rotation with the tokens' part."""
    from eagle3_core.training.kernels import rotary

    h, d = shape.heads, shape.head_dim
    flat, out, added = draw(rows, h, d), draw(rows, h, d), draw(rows, h * d)
    index, sums = torch.arange(rows, device=GPU), wide(rows, h * d)
    turn = Turn(wide(rows, d), wide(rows, d), index)
    size = flat.numel()
    show("rotation forward", rotary.forward, flat, added, index, turn, out, index, moved=6.0 * size)
    show("rotation backward", rotary.backward, flat, None, turn, out, sums, index, moved=12.0 * size)


def merges(shape: Shape, rows: int) -> None:
    """Merge with later blocks, by elements a warp."""
    from eagle3_core.training.kernels import diagonal

    h, g, d = shape.heads, shape.kv_heads, shape.head_dim
    first, q, out, grad = (draw(rows, h, d) for _ in range(4))
    index, lse = torch.arange(rows, device=GPU), wide(h, rows)
    for later in (1, 3, 6):
        keys, values = draw(later, rows, g, d), draw(later, rows, g, d)
        sums = wide(2, later, rows, g, d)
        for diagonal.ELEMENTS_A_WARP in (256, 512, 1024):
            name = f"merge of {later}, {diagonal.ELEMENTS_A_WARP} a warp"
            show(
                name, attention.merge, first, lse, q, keys, values, index, index, 0.1, out,
                moved=2.0 * rows * (4 * h + 2 * later * g) * d,
            )  # fmt: skip
            show(
                f"{name}, backward", attention.merge_backward, grad, q, keys, values, index, index, out, lse,
                0.1, first, sums[0], sums[1], moved=2.0 * rows * (5 * h + 10 * later * g) * d,
            )  # fmt: skip


def losses(shape: Shape, rows: int) -> None:
    """Loss kernels, by block size."""
    from eagle3_core.training.kernels import rows_loss

    label, weight = torch.arange(rows, device=GPU) // STEPS, torch.rand(rows, device=GPU)
    logits, teacher = draw(rows, shape.draft_vocab), draw(rows // STEPS + 1, shape.draft_vocab)
    sums = rows_loss.teacher_sums(teacher)
    for rows_loss.BLOCK, rows_loss.WARPS in ((2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 16)):
        show(
            f"loss of rows, {rows_loss.BLOCK} by {rows_loss.WARPS}", rows_loss.losses_of_rows, LossConfig(),
            logits, teacher, sums, label, weight, True, moved=4.0 * logits.numel(),
        )  # fmt: skip
    show("teacher's sums", rows_loss.teacher_sums, teacher, moved=2.0 * teacher.numel())


def around(shape: Shape) -> None:
    """Casts, clipping and the optimizer, on the MLP's weights."""
    sizes = [(shape.hidden, 2 * shape.intermediate), (shape.intermediate, shape.hidden)]
    weights = [torch.nn.Parameter(wide(*size)) for size in sizes]
    count = sum(weight.numel() for weight in weights)
    for weight in weights:
        weight.grad = wide(*weight.shape)
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)
    show(f"AdamW of {count / 1e6:.0f} M", optimizer.step, moved=28.0 * count)
    show("clipping", torch.nn.utils.clip_grad_norm_, weights, 1.0, moved=12.0 * count)
    show("casts", lambda: [weight.detach().bfloat16() for weight in weights], moved=6.0 * count)


def main() -> None:
    """Print all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--share", type=float, nargs="+", default=[1.0, 0.5], help="of the rows computed")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    rows = shape.documents * shape.document_tokens
    ceilings()
    for share in options.share:
        first_blocks(shape, share)
    for part in (norms, gates, rotations, merges, losses):
        part(shape, rows)
    around(shape)
    for share in options.share:
        products(shape, round(rows * share))


if __name__ == "__main__":
    main()
