"""The type of a configuration field in the words of somebody who writes YAML, not Python."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize

SIMPLE: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    ByteSize: "size",
    NoneType: "null",
}


def type_in_words(annotation: Any) -> str:
    """`text or null`, `adamw or muon`, `list of whole numbers`; bounds are left out."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_in_words(parts[0])
    if origin in (Union, UnionType):
        return _either([type_in_words(part) for part in parts])
    if origin is Literal:
        return _either([str(part) for part in parts])
    if origin is tuple:
        return _list_of(parts)
    if origin is dict:
        return f"mapping of {type_in_words(parts[0])} to {type_in_words(parts[1])}"
    return SIMPLE[annotation]


def _list_of(parts: Sequence[Any]) -> str:
    """Of any length, or of as many as there are parts, which are of one type."""
    item = type_in_words(parts[0])
    items = f"{item}s" if item.endswith("number") else item
    return f"list of {items}" if parts[-1] is Ellipsis else f"list of {len(parts)} {items}"


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
