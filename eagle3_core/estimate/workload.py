"""The samples and tokens of a run: counted in the dataset, or estimated from the prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.config import RunConfig
from eagle3_core.data.conversations import Prompt, read_prompts
from eagle3_core.errors import DataError
from eagle3_core.identity import prompt_files
from eagle3_core.planning import RunPlan
from eagle3_core.store.dataset import Sample, read_dataset

USUAL_VOCABULARY = 1 << 16
TEMPLATE_CHARACTERS_PER_MESSAGE = 32


class Workload(BaseModel):
    """Tokens of a run."""

    model_config = ConfigDict(frozen=True)
    num_samples: int
    num_tokens: int
    num_answer_tokens: int
    is_exact: bool = Field(
        description="Counted in the dataset; otherwise estimated from the prompts, every answer as long as "
        "allowed."
    )
    num_heldout: int | None = Field(default=None, description="Samples held out; None where not known.")

    def num_benchmark_prompts(self, wanted: int) -> int:
        """Prompts that the benchmark decodes: no more than are held out."""
        return wanted if self.num_heldout is None else min(wanted, self.num_heldout)


@dataclass(frozen=True)
class Load:
    """What a run works on.

    Attributes:
        rows: tokens and answer tokens of each sample.
        samples: of the dataset, where it exists.
        num_heldout: how many of them are held out; None where that is not known.
    """

    rows: Sequence[tuple[int, int]]
    samples: Sequence[Sample] | None = None
    num_heldout: int | None = None

    @property
    def workload(self) -> Workload:
        """Sums over all samples."""
        return Workload(
            num_samples=len(self.rows),
            num_tokens=sum(tokens for tokens, _ in self.rows),
            num_answer_tokens=sum(answers for _, answers in self.rows),
            is_exact=self.samples is not None,
            num_heldout=self.num_heldout,
        )

    def head(self, count: int) -> Load:
        """The first samples only: about what `limit` would leave."""
        samples = None if self.samples is None else self.samples[:count]
        return Load(self.rows[:count], samples, self.num_heldout)


def load_of(plan: RunPlan) -> Load:
    """The samples of a planned run.

    Raises:
        DataError: there is no dataset yet, and a prompt file is missing or unreadable.
    """
    samples = _dataset(plan)
    return count_samples(samples) if samples else guess_samples(plan.config, plan.target.vocab_size)


def count_samples(samples: Sequence[Sample]) -> Load:
    """Those of a dataset."""
    rows = [(len(sample), int(sample.loss_mask.sum())) for sample in samples]
    return Load(rows, samples, sum(sample.split == "heldout" for sample in samples))


def guess_samples(config: RunConfig, vocab_size: int = USUAL_VOCABULARY) -> Load:
    """Estimate from the prompts that `prepare` will take up: every answer as long as allowed.

    A token stands for a quarter as many characters as its id has bits: four with 65,536 tokens.

    Raises:
        DataError: a prompt file is missing or unreadable.
    """
    files, share = prompt_files(config), config.data.heldout_fraction
    prompts = read_prompts(files, share, config.limit, warn=False).prompts
    longest = config.data.max_length
    answers = [config.data.generation.max_tokens * len(prompt.turns) for prompt in prompts]
    characters = math.log2(max(2, vocab_size)) / 4
    tokens = [_prompt_tokens(prompt, characters) for prompt in prompts]
    rows = [(min(longest, p + a), min(longest, a)) for p, a in zip(tokens, answers, strict=True)]
    return Load(rows, num_heldout=sum(prompt.split == "heldout" for prompt in prompts))


def _dataset(plan: RunPlan) -> list[Sample] | None:
    """The dataset's samples; None where it is missing or damaged, in which case `prepare` will make it."""
    manifest = plan.manifest("dataset")
    if manifest is None or manifest.state != "complete":
        return None
    try:
        return read_dataset(plan.store.fetch(manifest.ref))
    except DataError:
        return None


def _prompt_tokens(prompt: Prompt, characters_per_token: float) -> int:
    texts = (*([prompt.system] if prompt.system is not None else []), *prompt.turns)
    template = round(TEMPLATE_CHARACTERS_PER_MESSAGE / characters_per_token)
    return sum(int(len(text) // characters_per_token) + template for text in texts)
