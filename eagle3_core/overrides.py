"""Values that a command line sets over a profile, and which of them a wrong configuration is due to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from eagle3_core.errors import ConfigError


@dataclass(frozen=True)
class Override:
    """One value.

    Args:
        key: `section.field`.
        value: as YAML gives it.
        origin: how the person gave it, e.g. `--set section.field=value`.
    """

    key: str
    value: Any
    origin: str

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read the `section.field=value` of `--set`; the value is YAML.

        Raises:
            ConfigError: not of that form.
        """
        key, separator, value = text.partition("=")
        origin = f"--set {text}"
        if not separator or not key:
            raise ConfigError(origin, expected="`section.field=value`")
        try:
            return cls(key, yaml.safe_load(value), origin)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{origin}: the value is not YAML ({getattr(error, 'problem', error)})",
                remedy="quote it, as in `KEY='\"value\"'`",
            ) from error

    @property
    def path(self) -> tuple[str, ...]:
        """Sections and field."""
        return tuple(self.key.split("."))

    def apply(self, document: dict[str, Any]) -> None:
        """Put the value into a profile's document.

        Raises:
            ConfigError: something on the way to the field is not a section.
        """
        *sections, field = self.path
        for section in sections:
            document = document.setdefault(section, {})
            if not isinstance(document, dict):
                raise ConfigError(f"{self.origin}: {section} is not a section")
        document[field] = self.value


def origin_of(source: str, overrides: Sequence[Override], path: Sequence[str], message: str) -> str:
    """Where a wrong value came from.

    Args:
        source: of what no override has set, the profile.
        overrides: in the order in which they were applied.
        path: sections and field that the error is about; of fields that do not fit together their section.
        message: of the error, which names such fields.

    Returns:
        The override that set the field, or the source, with the overrides in it that the message names.
    """
    path = tuple(path)
    for override in reversed(overrides):
        if path[: len(override.path)] == override.path:
            return override.origin
    last = {override.key: override for override in overrides if override.path[: len(path)] == path}
    named = [one.origin for one in last.values() if re.search(rf"\b{re.escape(one.path[-1])}\b", message)]
    return f"{source} with {', '.join(named)}" if named else source
