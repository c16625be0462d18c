"""Renders chats with the target's own template and finds the tokens of the answers in them.

Legend: S tokens of a rendered chat.

The rule of the loss mask: an answer's content and its end-of-turn token, nothing else. ChatML, "hi" / "ok":

    token   <|im_start|> user \\n hi <|im_end|> \\n <|im_start|> assistant \\n ok <|im_end|> \\n
    mask         0        0   0  0      0      0       0           0      0  1      1      0

Where a turn starts is known from the template's generation tags if it marks every answer, and else from
rendering the messages before it with a generation prompt. Either way the rendered text from there on must be
the answer followed by an end-of-turn token: a turn that cannot be found so is an error, never a zero mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class RenderedChat:
    """Token ids of a chat, and where its answers lie.

    Attributes:
        input_ids: [S] int32.
        answers: [start, stop) token range of every assistant message, its end-of-turn token included.
    """

    input_ids: np.ndarray
    answers: tuple[tuple[int, int], ...]

    @property
    def loss_mask(self) -> np.ndarray:
        """[S] uint8, 1 on the answers' tokens."""
        mask = np.zeros(len(self.input_ids), np.uint8)
        for start, stop in self.answers:
            mask[start:stop] = 1
        return mask


class ChatTemplate:
    """A tokenizer with its chat template and the ids that end a turn.

    Raises:
        DataError: the tokenizer has no chat template, or no id ends a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int], name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        self.end_ids = frozenset(end_ids)
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise DataError(f"the tokenizer of {name} has no chat template", remedy="add chat_template.jinja")
        if not self.end_ids:
            raise DataError(f"{name} names no end-of-turn token", remedy="set eos_token_id there")
        self._source = template
        self._ends = tuple(filter(None, (tokenizer.decode([token]) for token in sorted(self.end_ids))))

    @property
    def num_ids(self) -> int:
        """One more than the greatest id that has a token."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def prompt_ids(self, messages: Messages) -> list[int]:
        """What a serving engine sees when it is to answer the last of `messages`.

        Raises:
            DataError: the template refuses the messages.
        """
        return self._tokenize(self._render(messages, add_generation_prompt=True))

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> RenderedChat:
        """Token ids of a chat and the places of its answers.

        Raises:
            DataError: the template refuses the messages, or an answer cannot be found in what it made.
        """
        text = self._render(messages, add_generation_prompt=add_generation_prompt)
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        starts = self._tagged_starts(messages, text, add_generation_prompt)
        if starts is None or len(starts) != len(contents):
            starts = self._rendered_starts(messages, text)
        limits = [*starts, len(text)][1:]
        spans = [
            self._find(text, content, start, limit)
            for content, start, limit in zip(contents, starts, limits, strict=True)
        ]
        input_ids, answers = self._token_ranges(text, spans)
        for start, stop in answers:
            if start >= stop or input_ids[stop - 1] not in self.end_ids:
                raise self._not_found("the tokens of an answer do not end with an end-of-turn token")
        return RenderedChat(np.array(input_ids, np.int32), tuple(answers))

    def decode_answer(self, token_ids: list[int]) -> str:
        """The text of generated tokens without their end-of-turn token."""
        stopped = token_ids and token_ids[-1] in self.end_ids
        content = token_ids[:-1] if stopped else token_ids
        return self.tokenizer.decode(content, clean_up_tokenization_spaces=False)

    def _render(self, messages: Messages, *, add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:  # a template is a program: what it raises is of this conversation alone
            raise DataError(
                f"the chat template of {self.name} refuses the conversation: {type(error).__name__}: {error}"
            ) from error

    def _tagged_starts(self, messages: Messages, text: str, add_generation_prompt: bool) -> list[int] | None:
        """Where the template's generation tags open, or None if it has none."""
        if not GENERATION_TAG.search(self._source):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, spans = render_jinja_template(
            [messages],
            chat_template=self._source,
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **self.tokenizer.special_tokens_map,
        )
        return [start for start, _ in spans[0]] if rendered[0] == text else None

    def _rendered_starts(self, messages: Messages, text: str) -> list[int]:
        """Where each answer starts: the length of the chat before it with a generation prompt."""
        starts = []
        for position, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:position], add_generation_prompt=True)
                if not text.startswith(before):
                    raise self._not_found("it renders a chat's beginning differently when the chat goes on")
                starts.append(len(before))
        return starts

    def _find(self, text: str, content: str, start: int, limit: int) -> tuple[int, int]:
        """[start, stop) characters of an answer and its end of turn within text[start:limit].

        A template may put something before the content (an empty reasoning block) or leave out its
        beginning (the reasoning of earlier turns).
        """
        for wanted in (content, content.strip()):
            for end in self._ends:
                place = text.find(wanted + end, start, limit)
                if place >= 0 and not any(mark in text[start:place] for mark in self._ends):
                    return place, place + len(wanted) + len(end)
        ends = [(place, end) for end in self._ends if (place := text.find(end, start, limit)) >= 0]
        if ends:
            place, end = min(ends)
            shown = text[start:place].strip()
            if shown and content.strip().endswith(shown):
                return start, place + len(end)
        raise self._not_found(
            f"where the answer {content[:40]!r} should start it renders {text[start : start + 40]!r}"
        )

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _token_ranges(
        self, text: str, spans: list[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the text and the range of tokens that lie wholly inside each span of characters."""
        if not self.tokenizer.is_fast:
            return self._prefix_ranges(text, spans)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        ranges = []
        for start, stop in spans:
            inside = np.flatnonzero((offsets[:, 0] >= start) & (offsets[:, 1] <= stop))
            ranges.append((int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0))
        return list(encoded["input_ids"]), ranges

    def _prefix_ranges(
        self, text: str, spans: list[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The same without offsets: a text up to a border must have the same tokens alone as in the whole."""
        ids = self._tokenize(text)
        ranges = []
        for start, stop in spans:
            before, through = self._tokenize(text[:start]), self._tokenize(text[:stop])
            if ids[: len(before)] != before or ids[: len(through)] != through:
                raise self._not_found("a token reaches across the border of an answer")
            ranges.append((len(before), len(through)))
        return ids, ranges

    def _not_found(self, why: str) -> DataError:
        return DataError(
            f"answers cannot be found in what the chat template of {self.name} renders: {why}",
            remedy="mark the answers in the template with {% generation %} tags",
        )


def load_chat_template(folder: Path, *, trust_remote_code: bool = False) -> ChatTemplate:
    """The chat template of a target's folder.

    Raises:
        DataError: no usable tokenizer or template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cannot load the tokenizer of {folder}: {error}") from error
    return ChatTemplate(tokenizer, end_of_turn_ids(folder, tokenizer), str(folder))


def end_of_turn_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that end a turn: those of the target's configuration files and the tokenizer's own."""
    found: list[Any] = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        document = json.loads(path.read_text()) if path.is_file() else {}
        for config in (document, document.get("text_config") or {}):
            value = config.get("eos_token_id")
            found += value if isinstance(value, list) else [value]
    return frozenset(token for token in found if isinstance(token, int))
