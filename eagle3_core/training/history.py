"""What a training remembers of itself beside weights and position; part of every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3_core.contracts import AcceptanceFigures, EpochMetrics, KeptWeights
from eagle3_core.sections import TrainConfig
from eagle3_core.training.checkpoint import weights_name
from eagle3_core.training.health import RecentSteps
from eagle3_core.training.selection import best_evaluations, evaluations_without_gain, should_stop


@dataclass
class History:
    """Looks at the held-out split, oldest first, and the steps that the next one is judged by.

    Attributes:
        looks: what each look found.
        benchmarks: at each look, the benchmark's prompts replayed.
        recent: losses and gradient norms of recent steps, and how many were left out.
        num_empty_packs: packs without a loss row.
    """

    looks: list[EpochMetrics] = field(default_factory=list)
    benchmarks: list[AcceptanceFigures] = field(default_factory=list)
    recent: RecentSteps = field(default_factory=RecentSteps)
    num_empty_packs: int = 0

    @property
    def lengths(self) -> list[float]:
        """Held-out acceptance length of each look."""
        return [look.heldout.acceptance_length for look in self.looks]

    def add(self, look: EpochMetrics, benchmark: AcceptanceFigures, keep: int) -> str | None:
        """Remember a look; returns the file that its weights must go to if they are among the best."""
        self.looks.append(look)
        self.benchmarks.append(benchmark)
        is_kept = len(self.looks) - 1 in best_evaluations(self.lengths, keep)
        return weights_name(look.step) if is_kept else None

    def best_files(self, keep: int) -> list[str]:
        """Files of the best `keep` weights so far, the best first."""
        return [weights_name(self.looks[index].step) for index in best_evaluations(self.lengths, keep)]

    @property
    def best(self) -> int:
        """Index of the best look."""
        return best_evaluations(self.lengths, 1)[0]

    def kept(self, keep: int, draft_file: str) -> list[KeptWeights]:
        """What a finished checkpoint holds: the best weights as `draft_file`, the others as they are."""
        places = best_evaluations(self.lengths, keep)
        files = [draft_file, *self.best_files(keep)[1:]]
        return [
            KeptWeights(
                step=self.looks[index].step,
                epoch=self.looks[index].epoch,
                acceptance_length=self.lengths[index],
                file=file,
            )
            for index, file in zip(places, files, strict=True)
        ]

    def early_stop(self, train: TrainConfig) -> str:
        """Why training should end now; empty if it should not."""
        if not should_stop(self.lengths, train.early_stop_evaluations, train.early_stop_min_gain):
            return ""
        since = evaluations_without_gain(self.lengths, train.early_stop_min_gain)
        looks = "1 evaluation" if since == 1 else f"{since} evaluations"
        gain = f" of {train.early_stop_min_gain:g}" if train.early_stop_min_gain else ""
        return (
            f"stopped early at step {self.looks[-1].step:,}: {looks} without a gain{gain} "
            f"in held-out acceptance length, of which the best is {max(self.lengths):.3f}"
        )

    def document(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {
            "looks": [look.model_dump(mode="json") for look in self.looks],
            "benchmarks": [figures.model_dump(mode="json") for figures in self.benchmarks],
            "recent": self.recent.document(),
            "num_empty_packs": self.num_empty_packs,
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> History:
        """The history that `document` made."""
        return cls(
            looks=[EpochMetrics.model_validate(look) for look in document["looks"]],
            benchmarks=[AcceptanceFigures.model_validate(figures) for figures in document["benchmarks"]],
            recent=RecentSteps(**document["recent"]),
            num_empty_packs=document["num_empty_packs"],
        )


def describe_look(look: EpochMetrics, num_epochs: int, tokens_per_second: float | None) -> str:
    """A look in one line."""
    where = "epoch" if look.is_epoch_end else f"step {look.step}, in epoch"
    rates = " ".join(f"{rate:.3f}" for rate in look.heldout.per_position)
    return (
        f"{where} {look.epoch + 1} of {num_epochs}: loss {look.train_loss:.3f}, held-out loss "
        f"{look.heldout_loss:.3f}, held-out acceptance length {look.heldout.acceptance_length:.3f} "
        f"(K={look.heldout.num_speculative_tokens}, n={look.heldout.num_samples}; by position {rates}), "
        f"{tokens_per_second or 0.0:.0f} tokens/s, {look.seconds:.1f} s"
    )
