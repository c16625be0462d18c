"""From answered conversations to samples: token ids with a loss mask.

A sample is what the serving engine saw and made: the prompt of the last turn and the tokens generated for
it. The mask marks tokens that the target generated. Of earlier answers, which stand in the prompt as text,
these are the ones that the tokenizer turns back into the generated ids; an end-of-turn token that the
template put after an answer cut at max_tokens is not generated. Two turns, the first one cut:

    input_ids   u  a  a  end  u  b  b  end
    loss_mask   0  1  1   0   0  1  1   1
                              ^ prompt_length is 5
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from eagle3_core.contracts import Rejection
from eagle3_core.data.conversations import Prompt
from eagle3_core.data.regenerate import Answer
from eagle3_core.data.template import ChatTemplate
from eagle3_core.errors import DataError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import write_atomic

CONVERSATIONS_FILE = "conversations.jsonl"


@dataclass(frozen=True)
class Conversation:
    """A prompt with an answer to each of its turns."""

    prompt: Prompt
    answers: list[Answer]

    @property
    def is_cut(self) -> bool:
        """Whether the last answer was cut before its end of turn."""
        return self.answers[-1].finish_reason == "length"


@dataclass
class SampleSet:
    """The samples of a dataset, and how they came about."""

    samples: list[Sample] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    num_truncated: int = 0
    num_unmasked_answers: int = 0


def write_conversations(folder: Path, conversations: Sequence[Conversation]) -> Path:
    """Write answered conversations as JSON lines and return the file."""
    lines = [json.dumps(asdict(conversation), ensure_ascii=False) + "\n" for conversation in conversations]
    write_atomic(folder / CONVERSATIONS_FILE, "".join(lines))
    return folder / CONVERSATIONS_FILE


def read_conversations(folder: Path) -> list[Conversation]:
    """Read the conversations of an artifact.

    Raises:
        DataError: missing or unreadable.
    """
    path = folder / CONVERSATIONS_FILE
    try:
        rows = [json.loads(line) for line in path.read_text().split("\n") if line]
        return [
            Conversation(
                Prompt(**row["prompt"] | {"turns": tuple(row["prompt"]["turns"])}),
                [Answer(**answer) for answer in row["answers"]],
            )
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot read the conversations {path} ({error!r})") from error


def build_samples(
    conversations: Iterable[Conversation], chat: ChatTemplate, max_length: int, min_trainable_tokens: int
) -> SampleSet:
    """Samples of all conversations that have something to train on; the others are rejected with a reason.

    Args:
        max_length: longer samples are cut here; one whose last answer would begin beyond is rejected.
        min_trainable_tokens: samples with fewer tokens under the mask are rejected.
    """
    made = SampleSet()
    for conversation in conversations:
        key = conversation.prompt.key
        try:
            ids, mask, prompt_length, num_unmasked = tokens_and_mask(conversation, chat)
        except DataError as error:
            made.rejected.append(Rejection(key=key, reason=str(error)))
            continue
        trainable = int(mask[:max_length].sum())
        if prompt_length >= max_length:
            reason = f"no trainable tokens: a prompt of {prompt_length:,}, data.max_length is {max_length:,}"
        elif trainable < min_trainable_tokens:
            reason = (
                f"too few trainable tokens: {trainable} of data.min_trainable_tokens {min_trainable_tokens}"
            )
        else:
            reason = ""
        if reason:
            made.rejected.append(Rejection(key=key, reason=reason))
            continue
        is_cut = conversation.is_cut or len(ids) > max_length
        made.num_truncated += is_cut
        made.num_unmasked_answers += num_unmasked
        made.samples.append(
            Sample(
                key=key,
                kind=conversation.prompt.kind,
                split=conversation.prompt.split or "train",
                input_ids=ids[:max_length],
                loss_mask=mask[:max_length],
                prompt_length=prompt_length,
                finish_reason="length" if is_cut else "stop",
            )
        )
    return made


def tokens_and_mask(
    conversation: Conversation, chat: ChatTemplate
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Ids [S] int32, mask [S] uint8, prompt length, and the number of earlier answers left unmasked.

    Raises:
        DataError: an answer has no text or white space alone, an earlier one cannot be found in the prompt,
            or the tokenizer makes another prompt than the engine was given.
    """
    for turn, answer in enumerate(conversation.answers, start=1):
        if not answer.text.strip():
            raise DataError(f"empty answer: the target wrote no text in turn {turn}, or white space alone")
    *earlier, last = conversation.answers
    ids = np.array(last.prompt_ids + last.token_ids, np.int32)
    mask = np.zeros(len(ids), np.uint8)
    mask[len(last.prompt_ids) :] = 1
    if not earlier:
        return ids, mask, len(last.prompt_ids), 0
    messages = conversation.prompt.messages([answer.text for answer in earlier])
    rendered = chat.render(messages, add_generation_prompt=True)
    if not np.array_equal(rendered.input_ids, last.prompt_ids):
        raise DataError(
            f"the tokenizer makes {len(rendered.input_ids)} tokens of a prompt that the engine saw as "
            f"{len(last.prompt_ids)}, or other ones",
            remedy="remove the conversations artifact and run the stage prepare again",
        )
    num_unmasked = 0
    for answer, (start, stop) in zip(earlier, rendered.answers, strict=True):
        own = _num_own(ids[start:stop], answer)
        mask[start : start + own] = 1
        num_unmasked += own == 0
    return ids, mask, len(last.prompt_ids), num_unmasked


def _num_own(shown: np.ndarray, answer: Answer) -> int:
    """How many tokens of an answer with its end of turn, as the prompt shows it, the target generated so."""
    stopped = answer.finish_reason == "stop"
    content = answer.token_ids[:-1] if stopped else answer.token_ids
    if not np.array_equal(shown[:-1], content):
        return 0
    return len(shown) if stopped and shown[-1] == answer.token_ids[-1] else len(content)
