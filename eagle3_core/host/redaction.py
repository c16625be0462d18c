"""What must not be written down: values of secret environment variables; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle3_core.config import RunConfig

SECRET_NAME = re.compile(r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
MIN_SECRET_LENGTH = 8
MASK = "***"


class Redactor:
    """Replaces the values of secret environment variables in text."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        secrets = {value for name, value in environment.items() if is_secret(name, value)}
        self._secrets = sorted(secrets, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """The text with `***` in place of each secret."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text

    def all_of(self, value: Any) -> Any:
        """A JSON-able value with each text in it redacted, keys too."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {self.all_of(key): self.all_of(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.all_of(entry) for entry in value]
        return value


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable holds something that must not be written down."""
    return bool(SECRET_NAME.search(name)) and len(value) >= MIN_SECRET_LENGTH and not value.isdigit()


def without_secrets(config: RunConfig) -> RunConfig:
    """The configuration as it may be written to a disk: secrets of `engine.environment` are masked."""
    shown = {
        name: MASK if is_secret(name, value) else value for name, value in config.engine.environment.items()
    }
    return config.model_copy(update={"engine": config.engine.model_copy(update={"environment": shown})})
