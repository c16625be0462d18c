"""Floating-point operations of our training step, by part: what no implementation of it can leave out.

`python -m benchmarks.train_floor --shape llama-8b --tflops 700` prints a table. Two operations a
multiply-add; a weight that is trained costs three products (forward, gradient by its input, gradient by the
weight), the frozen LM head two, the teacher one. The embeddings' half of the projections is made once a
token and its input needs no gradient.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from eagle3_core.training.rows import RowPlan, plan_rows

if TYPE_CHECKING:
    from benchmarks.train_sides import Shape

NUM_AUX = 3


def step_flops(shape: Shape, plan: RowPlan) -> dict[str, float]:
    """FLOPs of one optimizer step by part, for a draft of one layer."""
    hidden, query, key = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    every = plan.offsets[-1]
    rows = [len(step.rows) for step in plan.steps]
    first, later, total = rows[0], sum(rows[1:]), sum(rows)
    pairs = sum(_pairs(step.runs) for step in plan.steps)
    return {
        "fc": 2 * 2 * every * NUM_AUX * hidden * hidden,
        "q, k, v of tokens": 2 * 2 * hidden * (first * query + every * 2 * key),
        "q, k, v of states": 3 * 2 * hidden * (total * query + (every + later) * 2 * key),
        "attention": (2 + 5) * 2 * pairs * query,
        "o": 3 * 2 * total * query * hidden,
        "MLP": 3 * 2 * total * 3 * hidden * shape.intermediate,
        "LM head": 2 * 2 * sum(plan.counts) * hidden * shape.draft_vocab,
        "teacher": 2 * len(plan.labels) * hidden * shape.draft_vocab,
    }


def _pairs(runs: tuple) -> int:
    """Query-key pairs under the causal mask."""
    found = 0
    for run in runs:
        queries, keys = run.query_end - run.query_start, run.key_end - run.key_start
        found += queries * (2 * keys - queries + 1) // 2
    return found


def main() -> None:
    """Print the table for half and for all tokens with loss."""
    from benchmarks.train_sides import SHAPES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--tflops", type=float, default=700.0, help="rate of large bf16 products")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    columns = []
    for share in (0.5, 1.0):
        mask = np.zeros(shape.document_tokens, bool)
        mask[round(shape.document_tokens * (1 - share)) :] = True
        plan = plan_rows(
            [shape.document_tokens] * shape.documents, np.tile(mask, shape.documents), options.steps
        )
        columns.append(step_flops(shape, plan))
    print(f"{options.shape}, {options.steps} steps: TFLOP (ms at {options.tflops:.0f} TFLOP/s)")
    print(f"{'':20s}{'half with loss':>22s}{'all with loss':>22s}")
    for part in columns[0]:
        cells = [f"{c[part] / 1e12:8.2f} ({c[part] / options.tflops / 1e9:6.1f})" for c in columns]
        print(f"{part:20s}" + "".join(f"{cell:>22s}" for cell in cells))
    tokens = shape.documents * shape.document_tokens
    for column, share in zip(columns, ("half", "all"), strict=True):
        total = sum(column.values())
        seconds = total / options.tflops / 1e12
        print(f"{share}: {total / 1e12:.1f} TFLOP, {1000 * seconds:.1f} ms, {tokens / seconds:,.0f} tokens/s")


if __name__ == "__main__":
    main()
