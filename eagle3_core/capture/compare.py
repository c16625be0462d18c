"""Pure comparisons of stored states with what they should be.

Legend: S tokens, A auxiliary layers, H hidden size, R rows with a final state, V vocabulary, N layers.

Which rows the next-token check uses, on five tokens (the answer begins at 3, so rows 3 and 4 have a final
state; the state of row j predicts token j + 1, and token 4 is the last):

    j            0    1    2    3    4
    input_ids    p    p    p    a    end
    loss_mask    0    0    0    1    1
    checked                     yes        l[3] = l[4] = 1: the state of row 3 must give token 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3_core.contracts import LayerCheck
from eagle3_core.target.rounding import TIE_TOLERANCE

FEW_MISSES = 2
"""Rows of one sample that may miss, however few rows it has."""
WRONG_LAYER_RATIO = 5.0
"""The nearest wrong layer must be at least this many times as far away as the right one."""


@dataclass(frozen=True)
class NextTokenCounts:
    """Rows of a next-token check: `rows` of which `exact` agree and `ties` are within rounding."""

    rows: int = 0
    exact: int = 0
    ties: int = 0

    def __add__(self, other: NextTokenCounts) -> NextTokenCounts:
        return NextTokenCounts(self.rows + other.rows, self.exact + other.exact, self.ties + other.ties)

    @classmethod
    def of(cls, exact: torch.Tensor, ties: torch.Tensor) -> NextTokenCounts:
        """Count the rows [R] that `match_next_tokens` judged."""
        return cls(len(exact), int(exact.sum()), int(ties.sum()))

    @property
    def agreement(self) -> float:
        """(exact + ties) / rows; 0 without rows."""
        return (self.exact + self.ties) / self.rows if self.rows else 0.0

    @property
    def is_hopeless(self) -> bool:
        """Most rows miss, and not only because there are few: these states belong to other tokens.

        Rounding costs a row here and there. States of another sample, layer or target miss nearly always.
        """
        misses = self.rows - self.exact - self.ties
        return misses > FEW_MISSES and 2 * misses > self.rows


def checked_rows(loss_mask: torch.Tensor, final_rows: torch.Tensor) -> torch.Tensor:
    """Indices into `final_rows` [R] of rows j that are stored and have l[j] = l[j+1] = 1.

    Args:
        loss_mask: [S] uint8.
        final_rows: [R] rows of the sample that have a final state.
    """
    inside = final_rows + 1 < len(loss_mask)
    following = torch.where(inside, final_rows + 1, 0)
    generated = (loss_mask[final_rows] == 1) & (loss_mask[following] == 1)
    return torch.nonzero(inside & generated).flatten()


def match_next_tokens(logits: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of logits [R, V] give the expected next tokens [R], exactly and as a tie; [R] bool each.

    A row that does not give its token is a tie if the token's logit is within `TIE_TOLERANCE` times the
    absolute top logit of the top.
    """
    top, best = logits.max(dim=-1)
    found = logits.gather(1, expected.long().to(logits.device)[:, None])[:, 0]
    exact = best.cpu() == expected.long().cpu()
    near = ((top - found) <= TIE_TOLERANCE * top.abs()).cpu()
    return exact, near & ~exact


def relative_errors(states: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Per-row ‖a−b‖/‖b‖ of [..., H] against a reference of the same shape, in fp32."""
    a, b = states.float(), reference.float()
    return torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-20)


@dataclass(frozen=True)
class LayerDistances:
    """Per-row distances of one stored layer to every reference layer, first tokens left out.

    Attributes:
        capture_id: what the stored layer claims to be.
        errors: [rows, N + 1] distances by reference capture id.
        first_token: [samples, N + 1] the same for first tokens, whose norms are a hundred times larger.
    """

    capture_id: int
    errors: torch.Tensor
    first_token: torch.Tensor

    @property
    def medians(self) -> torch.Tensor:
        """[N + 1] median distance to each reference layer."""
        return self.errors.median(dim=0).values

    @property
    def nearest_id(self) -> int:
        """The reference layer with the smallest median distance."""
        return int(self.medians.argmin())

    @property
    def median_error(self) -> float:
        """Median distance to the claimed layer."""
        return float(self.medians[self.capture_id])

    @property
    def p99_error(self) -> float:
        """99th percentile of the distance to the claimed layer."""
        return float(torch.quantile(self.errors[:, self.capture_id], 0.99))

    @property
    def nearest_wrong_median(self) -> float:
        """Median distance to the nearest other layer."""
        return float(torch.cat([self.medians[: self.capture_id], self.medians[self.capture_id + 1 :]]).min())

    @property
    def first_token_error(self) -> float | None:
        """Greatest distance of a first token to the claimed layer; None where none is stored."""
        return float(self.first_token[:, self.capture_id].max()) if len(self.first_token) else None

    @property
    def is_right(self) -> bool:
        """Nearest to the claimed layer, the nearest wrong one at least five times as far."""
        apart = self.nearest_wrong_median >= WRONG_LAYER_RATIO * self.median_error
        return self.nearest_id == self.capture_id and apart

    def check(self) -> LayerCheck:
        """These distances as a step reports them."""
        return LayerCheck(
            capture_id=self.capture_id,
            nearest_id=self.nearest_id,
            median_error=self.median_error,
            p99_error=self.p99_error,
            nearest_wrong_median=self.nearest_wrong_median,
        )


def layer_distances(
    capture_id: int, stored: list[torch.Tensor], rows: list[torch.Tensor], references: list[torch.Tensor]
) -> LayerDistances:
    """Distances of one stored layer of several samples to all reference layers.

    Args:
        capture_id: the layer's claimed id.
        stored: for each sample its stored states [R, H].
        rows: for each sample the rows [R] of the sample that these are.
        references: for each sample all reference states [S, N + 1, H].
    """
    parts, firsts = [], []
    for states, which, reference in zip(stored, rows, references, strict=True):
        wide = states.float()[:, None].expand(-1, reference.shape[1], -1)
        errors = relative_errors(wide, reference[which])
        parts.append(errors[which > 0])
        firsts.append(errors[which == 0])
    return LayerDistances(capture_id, torch.cat(parts), torch.cat(firsts))


def pooled(parts: Sequence[LayerDistances]) -> LayerDistances:
    """The distances of one layer in several samples taken together."""
    return LayerDistances(
        parts[0].capture_id,
        torch.cat([part.errors for part in parts]),
        torch.cat([part.first_token for part in parts]),
    )


def nonfinite_counts(aux_states: torch.Tensor, final_states: torch.Tensor) -> list[tuple[int, int, int]]:
    """(layer index, NaN count, Inf count) of each layer of a sample with any; the final layer has index A.

    Args:
        aux_states: [S, A, H].
        final_states: [R, H].
    """
    layers = [*aux_states.unbind(dim=1), final_states]
    return [
        (index, int(states.isnan().sum()), int(states.isinf().sum()))
        for index, states in enumerate(layers)
        if not torch.isfinite(states).all()
    ]
