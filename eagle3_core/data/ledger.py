"""The account of a dataset: what was read is kept or rejected with a reason. Imports no torch."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from eagle3_core.contracts import PrepareResult, Rejection
from eagle3_core.errors import DataError

NUM_NAMED_REASONS = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ledger:
    """Every conversation that was read is kept or rejected with a reason."""

    num_read: int
    num_kept: int
    rejected: list[Rejection]

    @classmethod
    def of(cls, result: PrepareResult) -> Ledger:
        """The account of a finished dataset."""
        return cls(result.num_read, result.num_kept, result.rejected)

    def check(self, max_rejected_fraction: float, *, is_rehearsal: bool) -> None:
        """Raise `DataError` if nothing or too little was kept; a rehearsal only warns of the latter."""
        assert self.num_read == self.num_kept + len(self.rejected), "a conversation got lost"
        if not self.num_kept:
            raise DataError(
                f"no samples left: all {self.num_read:,} conversations were rejected ({self.reasons()})",
                remedy="correct the prompts or the chat template",
            )
        share = len(self.rejected) / self.num_read
        if share > max_rejected_fraction:
            problem = DataError(
                f"{len(self.rejected):,} of {self.num_read:,} conversations were rejected ({self.reasons()})",
                expected=f"at most {max_rejected_fraction:.0%}",
                remedy="correct the prompts or raise data.max_rejected_fraction",
            )
            if not is_rehearsal:
                raise problem
            logger.warning("%s", problem)

    def reasons(self) -> str:
        """The most frequent reasons with their counts."""
        counts = Counter(rejection.reason for rejection in self.rejected)
        named = [f"{count} x {reason}" for reason, count in counts.most_common(NUM_NAMED_REASONS)]
        others = len(counts) - len(named)
        return "; ".join(named + ([f"{others} other reasons"] if others else [])) or "no prompts were found"
