"""Floating-point operations of a pack, from its row plan and the draft's shape, and peaks of devices.

Legend: R rows of a pack, N_k rows computed at step k, M_k loss rows of step k, n labels, H hidden size,
I MLP width, h query heads, g key/value heads, d head size, D draft vocabulary, A auxiliary layers.

Counted are the products that the mathematics needs: two operations for each multiply-add of a matrix product,
once forward, once for the gradient of its input and once for that of its weight, where these are wanted.
Recomputed values, norms and softmax are not counted, as usual for model FLOP utilisation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from eagle3_core.training.rows import RowPlan, Run

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    (r"GB200", 2500e12),
    (r"\bB300\b", 2250e12),
    (r"\bB200\b", 2250e12),
    (r"GH200|\bH200\b", 989.4e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH800\b|\bH100\b", 989.4e12),
    (r"\bH20\b", 148e12),
    (r"\bA100\b|\bA800\b", 312e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA30\b", 165e12),
    (r"\bA10G\b", 70e12),
    (r"\bA10\b", 125e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"RTX 4090\b", 165.2e12),
    (r"RTX 3090\b", 71e12),
    (r"\bMI325X\b|\bMI300X\b", 1307.4e12),
)
"""Patterns of device names, and dense bf16 operations per second with fp32 sums by the makers' sheets."""


@dataclass(frozen=True)
class DraftShape:
    """What determines a draft's operations; `windows` are the keys seen in each layer, None for all."""

    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    num_layers: int
    vocabulary: int
    num_aux: int
    trains_head: bool = False
    windows: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, draft: Eagle3DraftModel) -> DraftShape:
        """The shape of a draft."""
        layer = draft.config.transformer_layer_config
        return cls(
            hidden=layer.hidden_size,
            intermediate=layer.intermediate_size,
            heads=layer.num_attention_heads,
            key_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            num_layers=layer.num_hidden_layers,
            vocabulary=draft.config.draft_vocab_size,
            num_aux=len(draft.config.eagle_aux_hidden_state_layer_ids),
            trains_head=draft.lm_head.weight.requires_grad,
            windows=tuple(
                draft.sliding_window if number in draft.sliding_window_indices else None
                for number in range(layer.num_hidden_layers)
            ),
        )


def peak_flops(device_name: str, compute_dtype: str) -> float | None:
    """Operations per second that a device could do; None where it is not known."""
    if compute_dtype != "bfloat16":
        return None
    found = (flops for pattern, flops in PEAK_BF16_FLOPS if re.search(pattern, device_name))
    return next(found, None)


class Work(NamedTuple):
    """One kind of product in a pack.

    Attributes:
        name: `fusion`, `tokens`, `layers`, `attention`, `head` or `teacher`.
        forward: operations of the forward pass.
        passes: how often that is, backward pass included.
    """

    name: str
    forward: float
    passes: int


def training_flops(plan: RowPlan, shape: DraftShape) -> float:
    """Operations of the forward and backward pass of one pack."""
    return sum(work.forward * work.passes for work in pack_work(plan, shape))


def pack_work(plan: RowPlan, shape: DraftShape) -> list[Work]:
    """The products of one pack by kind."""
    rows = plan.offsets[-1]
    layers = attention = 0.0
    for number, step in enumerate(plan.steps):
        computed = len(step.rows)
        for layer in range(shape.num_layers):
            is_short = number > 0 or layer == shape.num_layers - 1
            queries, runs = (computed, step.runs) if is_short else (rows, plan.all_rows)
            layers += _layer(shape, rows if number == 0 else computed, queries)
            window = shape.windows[layer] if shape.windows else None
            attention += _attention(shape, _pairs(runs, window) + number * queries)
    loss_rows = sum(plan.counts)
    readers = rows if shape.num_layers > 1 else len(plan.steps[0].rows)
    return [
        # The auxiliary states and the tokens need no gradient, the draft's own hidden states do.
        Work("fusion", _product(rows, shape.num_aux * shape.hidden, shape.hidden), 2),
        Work("tokens", _projections(shape, rows, readers), 2),
        Work("layers", layers, 3),
        Work("attention", attention, 3),
        Work("head", _product(loss_rows, shape.hidden, shape.vocabulary), 3 if shape.trains_head else 2),
        Work("teacher", _product(len(plan.labels), shape.hidden, shape.vocabulary), 1),
    ]


def _layer(shape: DraftShape, inputs: int, queries: int) -> float:
    """One forward pass of a decoder layer's matrices on hidden states: keys and values of all inputs, the
    rest of queries. The tokens' half of the first layer is projected once for all steps and not counted here.
    """
    mixed = _product(queries, shape.heads * shape.head_dim, shape.hidden)
    mlp = 3 * _product(queries, shape.hidden, shape.intermediate)
    return _projections(shape, inputs, queries) + mixed + mlp


def _projections(shape: DraftShape, inputs: int, queries: int) -> float:
    """Keys and values of all inputs, and queries, from vectors of the hidden size."""
    keys = _product(inputs, shape.hidden, 2 * shape.key_heads * shape.head_dim)
    return keys + _product(queries, shape.hidden, shape.heads * shape.head_dim)


def _attention(shape: DraftShape, pairs: int) -> float:
    """Scores and weighted sums of so many pairs of query and key, forward."""
    return 4.0 * pairs * shape.heads * shape.head_dim


def _pairs(runs: Iterable[Run], window: int | None = None) -> int:
    """Pairs of causal runs, n queries of which the last sees K keys: n K - n (n - 1) / 2 without a window.

    Of five keys, three queries and a window of four: 3, 4 and, instead of 5, again 4.
    """
    total = 0
    for run in runs:
        queries, keys = run.query_end - run.query_start, run.key_end - run.key_start
        total += queries * keys - queries * (queries - 1) // 2
        if window is not None and keys > window:
            beyond = min(queries, keys - window)
            total -= beyond * (keys - window) - beyond * (beyond - 1) // 2
    return total


def _product(rows: int, inputs: int, outputs: int) -> float:
    return 2.0 * rows * inputs * outputs
