"""Errors that reach the user, and the exit codes they end a process with.

Every error says what was found, what was expected where that helps, and what to do. `str(error)` is one
line; a traceback is for our own bugs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

EXIT_OK = 0
EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_STEP_FAILED = 3
EXIT_PARENT_GONE = 4
EXIT_INTERRUPTED = 130


class Eagle3Error(Exception):
    """Base of all errors with a message for the user.

    Args:
        found: what is wrong, with path, shard or field.
        expected: what would have been right; left out where `found` says it.
        remedy: what the user can do about it.
    """

    exit_code = EXIT_USER_ERROR
    details: Mapping[str, Any] = MappingProxyType({})
    """Findings beside the message, for tables; JSON-able."""

    def __init__(self, found: str, *, expected: str | None = None, remedy: str | None = None) -> None:
        self.found, self.expected, self.remedy = found, expected, remedy
        super().__init__(found, expected, remedy)

    def __str__(self) -> str:
        parts = [self.found]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.remedy:
            parts.append(self.remedy)
        return " ".join("; ".join(parts).split())


class ConfigError(Eagle3Error):
    """A profile or an override that cannot be run."""


class TargetError(Eagle3Error):
    """The target model is missing, unreadable or of an unknown layout."""


class DataError(Eagle3Error):
    """Prompts, conversations or the tokenised dataset cannot be used."""


class StoreError(Eagle3Error):
    """An artifact is missing, damaged, locked or of another identity."""


class MissingInputError(StoreError):
    """What a stage reads is not there; another stage makes it."""


class ObjectStoreError(StoreError):
    """The object store did not do what it was asked, also not when it was asked again."""


class ObjectAccessError(ObjectStoreError):
    """Credentials, bucket, permission or region are wrong: asking again does not help."""


class LostObjectError(ObjectStoreError):
    """An object is not in the bucket, or is another one than was put there."""


class FolderInUseError(StoreError):
    """Another process holds an artifact's folder."""


class CaptureError(Eagle3Error):
    """Hidden states could not be captured as asked."""


class ProbeError(Eagle3Error):
    """The engine does not capture the target's architecture as it should, or it could not be found out."""


class VerificationError(Eagle3Error):
    """Stored states are not what they claim to be.

    Args:
        found, expected, remedy: as of `Eagle3Error`.
        details: all findings, as the result of the checks would hold them; JSON-able, for tables.
    """

    def __init__(
        self,
        found: str,
        *,
        expected: str | None = None,
        remedy: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(found, expected=expected, remedy=remedy)
        self.details = details or {}


class TrainingError(Eagle3Error):
    """Training cannot start or must not go on."""


class RankError(TrainingError):
    """A process of a training ended before its time; training may go on from its last checkpoint."""


class ExportError(Eagle3Error):
    """The exported draft would not be loaded as it was trained."""


class BenchmarkError(Eagle3Error):
    """The benchmark could not be run or its result is below the configured limit."""


class HostError(Eagle3Error):
    """The host lacks something that the run needs: memory, disk, a free port, an engine environment."""


class DiskFullError(HostError):
    """A file system has no room for what must be written; a run that ends with it can be gone on with."""


class StepError(Eagle3Error):
    """A step's process ended badly.

    Args:
        found: the step's own error line, or its exit status.
        log_path: the step's complete log.
        tail: the last lines that the step printed.
        error_type: class of the error inside the step, e.g. `DataError`; None if the process just ended.
        details: findings that the error inside the step carried.
    """

    exit_code = EXIT_STEP_FAILED

    def __init__(
        self,
        found: str,
        *,
        log_path: str,
        tail: tuple[str, ...] = (),
        remedy: str | None = None,
        error_type: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(found, remedy=remedy or f"full log: {log_path}")
        self.log_path, self.tail, self.error_type = log_path, tail, error_type
        self.details = details or {}
