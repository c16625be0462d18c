"""Resumable checkpoints inside the folder of the checkpoint artifact, whose lock the trainer holds.

    resume.json                 what exists, newest first; replaced in one step, after the files it names
    resume-<step>.pt            weights, optimizer, position, counters, random state
    best-<epoch>.safetensors    trained weights of the best epoch so far
    metrics.jsonl               a line a step and an epoch; a checkpoint knows how many bytes belong to it

A process that is killed at any moment leaves a `resume.json` that names complete files. When training is
complete only the finished draft and `metrics.jsonl` remain. The bucket of a remote store gets the newest
checkpoint alone; `resume.json` names an older one besides, which is passed over where it is not there.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from eagle3_core.artifacts import ArtifactPlan, differing_keys
from eagle3_core.errors import StoreError, TrainingError
from eagle3_core.store.disk import make_room, patiently
from eagle3_core.store.files import append, atomic_file, hash_file, write_atomic

logger = logging.getLogger(__name__)
POINTER = "resume.json"
METRICS_FILE = "metrics.jsonl"
KEPT = 2
FORMAT_VERSION = 1
OnSaved = Callable[[int, Sequence[str], Sequence[str]], None]


class ResumeFolder:
    """Reads and writes the resumable checkpoints of one artifact.

    Args:
        folder: the artifact's folder, locked by the caller.
        plan: the artifact; a checkpoint of another identity is refused.
        on_saved: told after each save: the step, names of the files that a resume needs, and of those that
            are appended to. A store in a bucket takes them, so that another host can go on.
    """

    def __init__(self, folder: Path, plan: ArtifactPlan, on_saved: OnSaved | None = None) -> None:
        self._folder, self._plan, self._on_saved = folder, plan, on_saved
        self._entries: list[dict[str, Any]] = []

    def load(self) -> dict[str, Any] | None:
        """The newest state whose files are intact, or None where there is none to resume from.

        Raises:
            TrainingError: it belongs to another configuration; names what differs.
            StoreError: `resume.json` is there, but nothing that it names can be read.
        """
        pointer = self._folder / POINTER
        if not pointer.is_file():
            return None
        try:
            document = json.loads(pointer.read_text())
            identity, entries = document["identity"], document["checkpoints"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"cannot read {pointer} ({error})", remedy=self._remedy) from error
        if identity != self._plan.identity or document.get("format_version") != FORMAT_VERSION:
            raise TrainingError(
                f"{self._folder} holds a checkpoint of another configuration: "
                + "; ".join(differing_keys(self._plan.identity, identity)),
                remedy=self._remedy,
            )
        problems = []
        for position, entry in enumerate(entries):
            problem = self._problem(entry)
            if problem is None:
                self._entries = entries[position:]
                return self._read(entry)
            problems.append(problem)
            logger.warning("passing over a checkpoint: %s", problem)
        raise StoreError("no checkpoint can be resumed: " + "; ".join(problems), remedy=self._remedy)

    def save(self, state: dict[str, Any], step: int, best: str | None) -> None:
        """Make `state` the newest checkpoint; the pointer moves when its file is safe.

        Args:
            state: tensors and plain values.
            step: optimizer steps done.
            best: file of the best epoch's weights, which this checkpoint refers to.
        """
        path = self._folder / f"resume-{step:08d}.pt"
        self._write(path, tensor_bytes(state), functools.partial(torch.save, state))
        files = [path.name, *([best] if best else [])]
        hashes = {name: hash_file(self._folder / name) for name in files}
        others = [entry for entry in self._entries if entry["step"] != step]
        self._entries = [{"step": step, "file": path.name, "files": hashes}, *others][:KEPT]
        document = {
            "format_version": FORMAT_VERSION,
            "identity": self._plan.identity,
            "checkpoints": self._entries,
        }
        write_atomic(self._folder / POINTER, json.dumps(document, indent=1))
        if self._on_saved is not None:
            self._on_saved(step, [*files, POINTER], [METRICS_FILE])
        self._remove_unnamed()

    def save_best(self, tensors: dict[str, Tensor], epoch: int) -> str:
        """Write the weights of the best epoch so far; returns the file's name."""
        name = f"best-{epoch:05d}.safetensors"
        content = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        self._write(self._folder / name, len(content), lambda handle: handle.write(content))
        return name

    def load_best(self, name: str) -> dict[str, Tensor]:
        """The weights that `save_best` wrote."""
        return load_file(self._folder / name)

    def remove(self) -> None:
        """Delete what only a resume needs, the pointer first."""
        (self._folder / POINTER).unlink(missing_ok=True)
        self._entries = []
        self._remove_unnamed()

    def _write(self, path: Path, num_bytes: int, put: Callable[[Any], object]) -> None:
        """Write a file where there is room for it above the reserve, and again where the disk was full."""
        make_room(self._folder, num_bytes, path.name)

        def write() -> None:
            with atomic_file(path) as handle:
                failing = _FailingLater(handle)
                put(failing)
                failing.fail()

        patiently(write, self._folder, num_bytes, path.name)

    @property
    def _remedy(self) -> str:
        return f"remove {self._folder} to train from the start"

    def _problem(self, entry: dict[str, Any]) -> str | None:
        for name, digest in entry["files"].items():
            path = self._folder / name
            if not path.is_file():
                return f"{path} is missing"
            if hash_file(path) != digest:
                return f"{path} does not match its hash"
        return None

    def _read(self, entry: dict[str, Any]) -> dict[str, Any]:
        path = self._folder / entry["file"]
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise StoreError(f"cannot read {path} ({error})", remedy=self._remedy) from error

    def _remove_unnamed(self) -> None:
        named = {name for entry in self._entries for name in entry["files"]}
        for pattern in ("resume-*.pt", "best-*.safetensors"):
            for path in self._folder.glob(pattern):
                if path.name not in named:
                    path.unlink()


class _FailingLater:
    """Swallows a write's error and raises it afterwards: torch cannot pass one through its own code."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._error: OSError | None = None

    def write(self, block: bytes | memoryview) -> int:
        """Write a block, or pretend to once one could not be written."""
        if self._error is None:
            try:
                return self._handle.write(block)
            except OSError as error:
                self._error = error
        return memoryview(block).nbytes

    def flush(self) -> None:
        """Nothing: the file is flushed when it is whole."""

    def fail(self) -> None:
        """Raise the first error."""
        if self._error is not None:
            raise self._error


def tensor_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dictionaries and lists."""
    if isinstance(state, Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(tensor_bytes(value) for value in values)


class MetricsLog:
    """`metrics.jsonl`, one JSON object a line; after a resume it goes on where the checkpoint left it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_FILE
        self._handle = io.FileIO(self.path, "a")

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records; they reach the file at once."""
        append(self._handle, "".join(json.dumps(record) + "\n" for record in records).encode(), self.path)

    def sync(self) -> int:
        """Make what was written durable; returns the length in bytes."""
        patiently(lambda: os.fsync(self._handle.fileno()), self.path.parent, 0, self.path.name)
        return self._handle.seek(0, os.SEEK_END)

    def cut(self, length: int) -> None:
        """Drop what was written after a checkpoint.

        Raises:
            StoreError: the file is shorter than the checkpoint says.
        """
        found = self._handle.seek(0, os.SEEK_END)
        if found < length:
            raise StoreError(
                f"{self.path} has {found:,} bytes, the checkpoint was made at {length:,}",
                remedy=f"remove {self.path.parent} to train from the start",
            )
        self._handle.truncate(length)

    def close(self) -> None:
        self._handle.close()
