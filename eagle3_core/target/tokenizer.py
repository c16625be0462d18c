"""How many ids a target's tokenizer has, read off its files without a tokenizer library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from eagle3_core.errors import TargetError
from eagle3_core.target.files import TargetFiles, read_json

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
"""Files that make a tokenizer; the first that is there is read."""
PIECES_FIELD = 1
"""Number of the field `pieces` of SentencePiece's `ModelProto`."""
VARINT, BYTES_8, LENGTH, BYTES_4 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


def tokenizer_entries(files: TargetFiles) -> int | None:
    """One more than the highest token id, added tokens counted; None where no known tokenizer is there.

    Raises:
        TargetError: a tokenizer file is damaged.
    """
    for name in TOKENIZERS:
        content = files.read(name)
        if content is None:
            continue
        try:
            ids = list(_ids(name, content))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise TargetError(
                f"{files.name}/{name} is no tokenizer ({error!r})", remedy="fetch the file again"
            ) from error
        ids += _added_ids(files)
        return max(ids) + 1 if ids else None
    return None


def _ids(name: str, content: bytes) -> Iterable[int]:
    if name == "tokenizer.json":
        return _fast_ids(json.loads(content))
    if name == "vocab.json":
        return json.loads(content).values()
    if name == "tiktoken.model":
        return (int(line.split()[1]) for line in content.splitlines() if line.strip())
    return range(_count_pieces(content))


def _fast_ids(document: dict[str, Any]) -> Iterable[int]:
    """Ids of a `tokenizer.json`: the vocabulary is a mapping, or a list (unigram) in the order of ids."""
    vocabulary = document.get("model", {}).get("vocab", {})
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    for token in document.get("added_tokens") or ():
        yield token["id"]


def _added_ids(files: TargetFiles) -> list[int]:
    config = read_json(files, "tokenizer_config.json").get("added_tokens_decoder") or {}
    added = read_json(files, "added_tokens.json")
    return [*map(int, config), *(value for value in added.values() if isinstance(value, int))]


def _count_pieces(content: bytes) -> int:
    """Pieces of a SentencePiece model: the fields 1 at the top level of its protocol buffer."""
    at = count = 0
    while at < len(content):
        key, at = _varint(content, at)
        field, wire = key >> 3, key & 7
        count += field == PIECES_FIELD
        if wire == VARINT:
            _, at = _varint(content, at)
        elif wire == LENGTH:
            length, at = _varint(content, at)
            at += length
        elif wire in (BYTES_8, BYTES_4):
            at += 8 if wire == BYTES_8 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
    if at != len(content):
        raise ValueError(f"{len(content)} bytes, but the last field ends at {at}")
    return count


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """The variable-length integer at a place, and the place after it."""
    value = shift = 0
    while True:
        byte = content[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
