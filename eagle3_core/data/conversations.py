"""Reads prompt sources: JSONL rows with the turns that the target is to answer.

A row is `{"id"?, "kind"?, "split"?, "messages": [{"role", "content"}, ...]}`. The target answers every user
turn itself, so answers that a row brings along are replaced, and one before the first user turn is dropped.
Rows that cannot be used are rejected with place and reason: rows read = prompts + rejected + left out by a
limit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from eagle3_core.artifacts import canonical_json
from eagle3_core.contracts import Rejection
from eagle3_core.errors import DataError
from eagle3_core.store.dataset import Split

DEFAULT_KIND = "general"
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
"""Roles that a row may use, and what they mean."""
ROW_FIELDS = {"id", "kind", "split", "messages"}
TOOL_FIELDS = ("tools", "functions", "tool_calls", "function_call")
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""JSON can name half a surrogate pair, as `"\\ud83d"`; UTF-8 cannot hold it, so no file of a run could."""
NUM_SHOWN = 20
"""Letters shown before and after one that cannot be used."""
MIN_HELDOUT = 2
"""Held-out prompts that a limit keeps, if there are so many."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """The user's side of one conversation.

    Attributes:
        key: 16 hex digits of the content (system message and user turns); the same wherever the row stands.
        id: the row's own name, for people; need not be unique.
        split: `train`, `heldout`, or None until it has been assigned.
        system: the system message, or None.
        turns: the user's turns, each to be answered.
    """

    key: str
    id: str | None
    kind: str
    split: Split | None
    system: str | None
    turns: tuple[str, ...]

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """The chat up to the user turn that follows `answers`, or the whole chat if all are answered."""
        chat = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn, text in enumerate(self.turns[: len(answers) + 1]):
            chat.append({"role": "user", "content": text})
            if turn < len(answers):
                chat.append({"role": "assistant", "content": answers[turn]})
        return chat


@dataclass(frozen=True)
class PromptSet:
    """What was read: every row is a prompt, a rejection, or left out by the limit."""

    prompts: tuple[Prompt, ...]
    rejected: tuple[Rejection, ...]
    num_left_out: int
    num_replaced_answers: int

    @property
    def num_read(self) -> int:
        """Rows that the run takes up: kept plus rejected."""
        return len(self.prompts) + len(self.rejected)


def read_prompts(
    files: Sequence[Path], heldout_fraction: float, limit: int | None = None, *, warn: bool = True
) -> PromptSet:
    """Read JSONL files, assign splits and apply the limit; prompts keep the order of the files.

    `warn` logs fields that are not used and roles that are not known, a line for each.

    Raises:
        DataError: a file cannot be read.
    """
    prompts: dict[str, Prompt] = {}
    rejected: list[Rejection] = []
    reader = _RowReader()
    for place, line in _lines(files):
        try:
            prompt = reader.read(line)
        except _BadRowError as bad:
            rejected.append(Rejection(key=place, reason=str(bad)))
            continue
        if prompt.key in prompts:
            first = prompts[prompt.key]
            reason = f"exact duplicate of the prompt {first.key}" + (f" (id {first.id})" if first.id else "")
            rejected.append(Rejection(key=place, reason=reason))
        else:
            prompts[prompt.key] = prompt
    if warn:
        reader.warn()
    assigned = assign_splits(list(prompts.values()), heldout_fraction)
    chosen = limit_prompts(assigned, limit) if limit else assigned
    return PromptSet(
        prompts=tuple(chosen),
        rejected=tuple(rejected),
        num_left_out=len(assigned) - len(chosen),
        num_replaced_answers=reader.num_replaced_answers,
    )


def assign_splits(prompts: Sequence[Prompt], heldout_fraction: float) -> list[Prompt]:
    """Give each prompt without a split one: the same share of every kind, chosen by key.

    The shares are rounded so that their sum is right, and at least one prompt is held out if any fraction
    is. Twelve rows, six of each of two kinds, fraction 0.25: three are held out, two and one.
    """
    by_kind: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.key):
        if prompt.split is None:
            by_kind.setdefault(prompt.kind, []).append(prompt)
    counts = _shares({kind: len(group) for kind, group in by_kind.items()}, heldout_fraction)
    heldout = {prompt.key for kind, group in by_kind.items() for prompt in group[: counts[kind]]}
    return [
        prompt if prompt.split else replace(prompt, split="heldout" if prompt.key in heldout else "train")
        for prompt in prompts
    ]


def limit_prompts(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """At most `limit` prompts from all kinds and both splits, in order; which ones depends on keys alone."""
    heldout = [prompt for prompt in prompts if prompt.split == "heldout"]
    train = [prompt for prompt in prompts if prompt.split == "train"]
    share = round(limit * len(heldout) / max(1, len(prompts)))
    num_heldout = min(len(heldout), max(MIN_HELDOUT, share, limit - len(train)))
    chosen = _spread(heldout, num_heldout) | _spread(train, limit - num_heldout)
    return [prompt for prompt in prompts if prompt.key in chosen]


def _spread(prompts: Sequence[Prompt], count: int) -> set[str]:
    """Keys of `count` prompts, one of each kind in turn."""
    ranks: Counter[str] = Counter()
    order = []
    for prompt in sorted(prompts, key=lambda prompt: prompt.key):
        order.append((ranks[prompt.kind], prompt.kind, prompt.key))
        ranks[prompt.kind] += 1
    return {key for _, _, key in sorted(order)[:count]}


def _shares(sizes: dict[str, int], fraction: float) -> dict[str, int]:
    """Whole numbers near `fraction` of each size with the right sum (largest remainders win)."""
    total = sum(sizes.values())
    wanted = int(total * fraction + 0.5)
    if fraction > 0 and total > 1:
        wanted = max(1, wanted)
    counts = {kind: int(size * fraction) for kind, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda kind: (counts[kind] - sizes[kind] * fraction, kind))
    for kind in by_remainder[: max(0, wanted - sum(counts.values()))]:
        counts[kind] += 1
    return counts


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Place (`file:line`) and text of each line that is not blank."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the prompts {file} ({error})", expected="UTF-8 JSONL") from error
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"{file.name}:{number}", line


class _BadRowError(Exception):
    """Why a row cannot be used."""


class _RowReader:
    """Turns lines into prompts; collects what is worth one warning for all rows."""

    def __init__(self) -> None:
        self.num_replaced_answers = 0
        self._ignored: Counter[str] = Counter()
        self._unknown_roles: Counter[str] = Counter()

    def read(self, line: str) -> Prompt:
        """The prompt of a row; raises `_BadRowError`."""
        row = _parse(line)
        kind, split, identifier = row.get("kind", DEFAULT_KIND), row.get("split"), row.get("id")
        if not isinstance(kind, str) or not kind:
            raise _BadRowError(f"kind is {kind!r}; expected a word such as `code`")
        if split not in (None, *get_args(Split)):
            raise _BadRowError(f"split is {split!r}; expected one of {', '.join(get_args(Split))}")
        if not isinstance(identifier, str | int | None):
            raise _BadRowError(f"id is {identifier!r}; expected a text or a number")
        if "messages" not in row:
            fields = ", ".join(map(repr, sorted(row)))
            raise _BadRowError(f"no messages, only {fields or 'an empty object'}")
        system, turns = self._turns(row["messages"])
        self._ignored.update(row.keys() - ROW_FIELDS)
        content = {"system": system, "turns": list(turns)}
        key = hashlib.sha256(canonical_json(content)).hexdigest()[:16]
        name = None if identifier is None else str(identifier)
        return Prompt(key, name, kind, cast("Split | None", split), system, turns)

    def _turns(self, messages: Any) -> tuple[str | None, tuple[str, ...]]:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise _BadRowError("messages is not a list of {role, content}")
        system, turns, num_answers = None, [], 0
        for position, message in enumerate(messages):
            role = self._role(message)
            if role == "assistant":
                num_answers += 1
                continue
            text = message.get("content")
            if not isinstance(text, str) or not text.strip():
                raise _BadRowError(f"message {position + 1} ({role}) has no text")
            if role == "user":
                turns.append(text)
            elif position:
                raise _BadRowError(f"message {position + 1} is a system message; only the first one can be")
            else:
                system = text
        if not turns:
            raise _BadRowError("no user turn")
        self.num_replaced_answers += num_answers
        return system, tuple(turns)

    def _role(self, message: dict[str, Any]) -> str:
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            self._unknown_roles[str(role)] += 1
            raise _BadRowError(f"role {role!r}; expected one of {', '.join(ROLES)}")
        _refuse_tools(message)
        return ROLES[role]

    def warn(self) -> None:
        """Report what was found, one line for each kind of finding."""
        for role, count in sorted(self._unknown_roles.items()):
            logger.warning("rejected %d rows with the role %r", count, role)
        for field, count in sorted(self._ignored.items()):
            logger.warning("the field %r of %d rows is not used", field, count)
        if self.num_replaced_answers:
            logger.info("%d answers in the rows are replaced by the target's own", self.num_replaced_answers)


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadRowError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise _BadRowError(f"not a JSON object but {type(row).__name__}")
    _refuse_half_pairs(row)
    _refuse_tools(row)
    return row


def _refuse_half_pairs(row: dict[str, Any]) -> None:
    """Look at every key and text of a row, however deep."""
    parts: list[Any] = [row]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += [*part.values(), *part]
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, str) and (half := HALF_PAIR.search(part)):
            shown = part[max(0, half.start() - NUM_SHOWN) : half.end() + NUM_SHOWN]
            raise _BadRowError(f"half a surrogate pair in {shown!r}")


def _refuse_tools(fields: dict[str, Any]) -> None:
    used = [name for name in TOOL_FIELDS if fields.get(name)]
    if used:
        raise _BadRowError(f"uses {', '.join(used)}: tools are not supported")
