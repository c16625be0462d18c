"""Resumable checkpoints inside the folder of the checkpoint artifact, whose lock the trainer holds.

    resume.json                what exists, newest first; replaced in one step, after the files it names
    resume-<step>.pt           weights, optimizer, position, counters, random state, whole and by name
    best-<step>.safetensors    trained weights of the best evaluations so far
    metrics.jsonl              a line a step and an evaluation; a checkpoint knows how many bytes belong to it

A process that is killed at any moment leaves a `resume.json` that names complete files. When training is
complete the finished draft, `metrics.jsonl` and the weights that `train.keep_best` asks for remain. The
bucket of a remote store gets the newest checkpoint alone; `resume.json` names older ones besides, which are
passed over where they are not there.
"""

from __future__ import annotations

import functools
import json
import logging
import pickle
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from safetensors.torch import load_file, save
from torch import Tensor

from eagle3_core.artifacts import ArtifactPlan, differing_keys
from eagle3_core.contracts import METRICS_FILE
from eagle3_core.errors import StoreError, TrainingError
from eagle3_core.store.disk import make_room, patiently
from eagle3_core.store.files import atomic_file, hash_file, write_atomic
from eagle3_core.training.selection import Entry, removable, with_newest

logger = logging.getLogger(__name__)
POINTER = "resume.json"
FORMAT_VERSION = 2
OnSaved = Callable[[int, Sequence[str], Sequence[str]], None]


class ResumeFolder:
    """Reads and writes the resumable checkpoints of one artifact.

    Args:
        folder: the artifact's folder, locked by the caller.
        plan: the artifact; a checkpoint of another identity is refused.
        on_saved: told after each save: the step, names of the files that a resume needs, and of those that
            are appended to. A store in a bucket takes them, so that another host can go on.
        keep_last: checkpoints that stay.
        check_held: raises if another process has taken the folder over; asked before a file gets its name.
    """

    def __init__(
        self,
        folder: Path,
        plan: ArtifactPlan,
        on_saved: OnSaved | None = None,
        keep_last: int = 2,
        check_held: Callable[[], None] | None = None,
    ) -> None:
        self._folder, self._plan, self._on_saved = folder, plan, on_saved
        self._keep_last, self._check_held = keep_last, check_held
        self._entries: list[Entry] = []
        self._hashes: dict[str, str] = {}

    def load(self, required: Collection[str] = ()) -> dict[str, Any] | None:
        """The newest state whose files are intact, or None where there is none to resume from.

        Tensors are read from the file as they are used; copy what is to outlive it.

        Args:
            required: keys that the state must have.

        Raises:
            TrainingError: it belongs to another configuration, or lacks a part; names what.
            StoreError: `resume.json` is there, but nothing that it names can be read.
        """
        entries = self._pointed()
        if entries is None:
            return None
        problems = []
        for position, entry in enumerate(entries):
            problem = self._problem(entry)
            if problem is None:
                self._entries = entries[position:]
                self._hashes = dict(entry.files)
                return self._read(entry, required)
            problems.append(problem)
            logger.warning("passing over a checkpoint: %s", problem)
        raise StoreError("no checkpoint can be resumed: " + "; ".join(problems), remedy=self._remedy)

    def save(self, state: dict[str, Any], step: int, best: Sequence[str] = ()) -> None:
        """Make `state` the newest checkpoint; the pointer moves when its file is safe.

        Args:
            state: tensors and plain values.
            step: optimizer steps done.
            best: files of the best weights so far, which this checkpoint refers to.

        Raises:
            FolderInUseError: another process has taken the folder over; nothing in it has changed.
        """
        name = f"resume-{step:08d}.pt"
        self._write(name, tensor_bytes(state), functools.partial(torch.save, state))
        files = [name, *best]
        entry = Entry(step, name, {file: self._hashes[file] for file in files})
        self._entries = with_newest(self._entries, entry, self._keep_last)
        document = {
            "format_version": FORMAT_VERSION,
            "identity": self._plan.identity,
            "checkpoints": [each.document() for each in self._entries],
        }
        write_atomic(self._folder / POINTER, json.dumps(document, indent=1), self._check_held)
        if self._on_saved is not None:
            self._on_saved(step, [*files, POINTER], [METRICS_FILE])
        self._remove_unnamed()

    def save_weights(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write weights under a name of `weights_name`; a checkpoint that refers to them comes after."""
        content = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        self._write(name, len(content), lambda handle: handle.write(content))

    def load_weights(self, name: str) -> dict[str, Tensor]:
        """The weights that `save_weights` wrote."""
        return load_file(self._folder / name)

    def remove(self, keep: Sequence[str] = ()) -> None:
        """Delete what only a resume needs, the pointer first, and leave the files in `keep`."""
        (self._folder / POINTER).unlink(missing_ok=True)
        self._entries = []
        self._remove_unnamed(keep)

    def _write(self, name: str, num_bytes: int, put: Callable[[Any], object]) -> None:
        """Write a file where there is room for it above the reserve, and again where the disk was full."""
        make_room(self._folder, num_bytes, name)

        def write() -> str:
            with atomic_file(self._folder / name, self._check_held) as handle:
                hashing = _HashingHandle(handle)
                put(hashing)
                return hashing.finish()

        self._hashes[name] = patiently(write, self._folder, num_bytes, name)

    @property
    def _remedy(self) -> str:
        return f"remove {self._folder} to train from the start"

    def _pointed(self) -> list[Entry] | None:
        """What the pointer names, newest first; None where there is no pointer."""
        pointer = self._folder / POINTER
        if not pointer.is_file():
            return None
        try:
            document = json.loads(pointer.read_text())
            version, identity = document["format_version"], document["identity"]
            entries = [Entry(**entry) for entry in document["checkpoints"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"cannot read {pointer} ({error})", remedy=self._remedy) from error
        if identity != self._plan.identity:
            raise TrainingError(
                f"{self._folder} holds a checkpoint of another configuration: "
                + "; ".join(differing_keys(self._plan.identity, identity)),
                remedy=self._remedy,
            )
        if version != FORMAT_VERSION:
            raise TrainingError(
                f"{self._folder} holds a checkpoint in format {version}",
                expected=f"format {FORMAT_VERSION}",
                remedy=self._remedy,
            )
        return entries

    def _problem(self, entry: Entry) -> str | None:
        for name, digest in entry.files.items():
            path = self._folder / name
            if not path.is_file():
                return f"{path} is missing"
            if hash_file(path) != digest:
                return f"{path} does not match its hash"
        return None

    def _read(self, entry: Entry, required: Collection[str]) -> dict[str, Any]:
        path = self._folder / entry.file
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise StoreError(f"cannot read {path} ({error})", remedy=self._remedy) from error
        if lacking := sorted(set(required) - set(state)):
            raise TrainingError(
                f"{path} lacks {', '.join(lacking)}",
                expected=f"all of {', '.join(sorted(required))}: without them training would not go on as if "
                "it had never stopped",
                remedy=self._remedy,
            )
        return state

    def _remove_unnamed(self, keep: Sequence[str] = ()) -> None:
        names = [path.name for path in self._folder.iterdir()]
        for name in removable(names, self._entries, keep):
            (self._folder / name).unlink(missing_ok=True)


def weights_name(step: int) -> str:
    """The file of the weights of an evaluation that is among the best."""
    return f"best-{step:08d}.safetensors"


class _HashingHandle:
    """Hashes what passes, and keeps a write's error for the end: torch cannot pass one through its code."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._digest = xxhash.xxh3_128()
        self._error: OSError | None = None

    def write(self, block: bytes | memoryview) -> int:
        """Write a block, or pretend to once one could not be written."""
        if self._error is None:
            try:
                self._handle.write(block)
                self._digest.update(block)
            except OSError as error:
                self._error = error
        return memoryview(block).nbytes

    def flush(self) -> None:
        """Nothing: the file is flushed when it is whole."""

    def finish(self) -> str:
        """The hash of all blocks as hex; raises the first error instead if there was one."""
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()


def tensor_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dictionaries and lists."""
    if isinstance(state, Tensor):
        return state.nbytes
    values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(tensor_bytes(value) for value in values)
