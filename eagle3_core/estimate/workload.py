"""The samples and tokens of a run: counted in the dataset, or estimated from the prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.config import RunConfig
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


@dataclass(frozen=True)
class Load:
    """What a run works on.

    Attributes:
        rows: tokens and answer tokens of each sample.
        samples: of the dataset, where it exists.
    """

    rows: Sequence[tuple[int, int]]
    samples: Sequence[Sample] | None = None

    @property
    def workload(self) -> Workload:
        """Sums over all samples."""
        return Workload(
            num_samples=len(self.rows),
            num_tokens=sum(tokens for tokens, _ in self.rows),
            num_answer_tokens=sum(answers for _, answers in self.rows),
            is_exact=self.samples is not None,
        )

    def head(self, count: int) -> Load:
        """The first samples only: about what `limit` would leave."""
        return Load(self.rows[:count], None if self.samples is None else self.samples[:count])


def load_of(plan: RunPlan) -> Load:
    """The samples of a planned run.

    Raises:
        DataError: there is no dataset yet, and a prompt file is missing or unreadable.
    """
    samples = _dataset(plan)
    return count_samples(samples) if samples else guess_samples(plan.config, plan.target.vocab_size)


def count_samples(samples: Sequence[Sample]) -> Load:
    """Those of a dataset."""
    return Load([(len(sample), int(sample.loss_mask.sum())) for sample in samples], samples)


def guess_samples(config: RunConfig, vocab_size: int = USUAL_VOCABULARY) -> Load:
    """Estimate from the prompts: every answer as long as allowed.

    A token stands for a quarter as many characters as its id has bits: four with 65,536 tokens.

    Raises:
        DataError: a prompt file is missing or unreadable.
    """
    rows = [row for file in prompt_files(config) for row in _read_rows(file)]
    rows = rows[: config.limit] if config.limit else rows
    longest = config.data.max_length
    answers = [config.data.generation.max_tokens * max(1, _user_turns(row)) for row in rows]
    characters = math.log2(max(2, vocab_size)) / 4
    prompts = [_prompt_tokens(row, characters) for row in rows]
    return Load([(min(longest, p + a), min(longest, a)) for p, a in zip(prompts, answers, strict=True)])


def _dataset(plan: RunPlan) -> list[Sample] | None:
    """The dataset's samples; None where it is missing or damaged, in which case `prepare` will make it."""
    manifest = plan.manifest("dataset")
    if manifest is None or manifest.state != "complete":
        return None
    try:
        return read_dataset(plan.store.fetch(manifest.ref))
    except DataError:
        return None


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """The JSON objects of a prompt file; rows that are none are counted as empty, `prepare` names them."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the prompts {file} ({error})") from error
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = {}
        rows.append(row if isinstance(row, dict) else {})
    return rows


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = row.get("messages")
    return [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def _user_turns(row: dict[str, Any]) -> int:
    return sum(message.get("role") == "user" for message in _messages(row))


def _prompt_tokens(row: dict[str, Any], characters_per_token: float) -> int:
    return sum(
        int(len(str(message.get("content") or "")) // characters_per_token)
        + round(TEMPLATE_CHARACTERS_PER_MESSAGE / characters_per_token)
        for message in _messages(row)
    )
