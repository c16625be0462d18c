"""The files of a target, in a folder or elsewhere, and the tensors that its safetensors headers declare."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from eagle3_core.errors import TargetError

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100 << 20
NOT_HERE = "not here"

Header = dict[str, dict[str, Any]]
"""Of a safetensors file: name of a tensor to `dtype`, `shape` and `data_offsets`."""


class TensorPlace(BaseModel):
    """Where one tensor lies."""

    model_config = ConfigDict(frozen=True)
    name: str
    file: str
    shape: tuple[int, ...] = Field(description="Empty where the file is not here.")
    dtype: str = Field(description=f"As safetensors names it; `{NOT_HERE}` where the file is not here.")


class TargetFiles(Protocol):
    """What a target can be described from: its small files and the headers of its weights."""

    @property
    def name(self) -> str:
        """Folder or hub id, for messages."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of each file at the top level, by name."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of a small file, or None if there is none of that name."""
        ...

    def headers(self, names: Iterable[str]) -> dict[str, Header]:
        """The headers of safetensors files, by file name.

        Raises:
            TargetError: a file is missing or is not a whole safetensors file.
        """
        ...


class FolderFiles:
    """The files of a local folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def name(self) -> str:
        """The folder."""
        return str(self._folder)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, links followed: a hub snapshot consists of links."""
        return {file.name: file.stat().st_size for file in sorted(self._folder.glob("*")) if file.is_file()}

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None.

        Raises:
            TargetError: it cannot be read.
        """
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TargetError(f"cannot read {self._folder / name} ({error.strerror})") from error

    def headers(self, names: Iterable[str]) -> dict[str, Header]:
        """The header of each file."""
        return {name: read_header(self._folder / name) for name in names}


def read_header(file: Path) -> Header:
    """The tensors that a safetensors file declares: name to shape, dtype and data offsets.

    Raises:
        TargetError: missing, or not a whole safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes instead of {8 + length + end}")
        return header
    except (OSError, ValueError, struct.error, KeyError, TypeError) as error:
        raise TargetError(f"{file} is not a whole safetensors file ({error})") from error


def read_json(files: TargetFiles, name: str) -> dict[str, Any]:
    """A JSON object of the target; empty where there is no such file.

    Raises:
        TargetError: not a JSON object.
    """
    content = files.read(name)
    if content is None:
        return {}
    try:
        document = json.loads(content)
    except ValueError as error:
        raise TargetError(
            f"cannot read {files.name}/{name} ({error})", remedy="fetch or write the file again"
        ) from error
    if not isinstance(document, dict):
        raise TargetError(f"{files.name}/{name} is not a JSON object")
    return document


def find_tensors(files: TargetFiles) -> tuple[dict[str, TensorPlace], tuple[str, ...]]:
    """Every tensor by name, and the weight files that the index names but that are not there.

    Of a tensor in a missing file only the name and the file are known.

    Raises:
        TargetError: no safetensors weights at all, or a damaged header.
    """
    sizes = files.sizes()
    weight_map: dict[str, str] = read_json(files, INDEX_NAME).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise TargetError(
            f"{files.name}/{INDEX_NAME} has no weight_map from tensors to files",
            remedy="fetch or write the file again",
        )
    names = set(weight_map.values()) or {name for name in sizes if name.endswith(WEIGHTS_SUFFIX)}
    if not names:
        raise TargetError(f"{files.name} has no safetensors weights", remedy=_weights_remedy(sizes))
    missing = tuple(sorted(name for name in names if name not in sizes))
    places: dict[str, TensorPlace] = {}
    for name, header in files.headers(sorted(names - set(missing))).items():
        for tensor, entry in header.items():
            places[tensor] = TensorPlace(
                name=tensor, file=name, shape=tuple(entry["shape"]), dtype=entry["dtype"]
            )
    for tensor, name in weight_map.items():
        if name in missing:
            places[tensor] = TensorPlace(name=tensor, file=name, shape=(), dtype=NOT_HERE)
    return places, missing


def _weights_remedy(sizes: dict[str, int]) -> str:
    others = [name for name in sizes if name.endswith((".bin", ".pt", ".pth", ".gguf", ".npz"))]
    if others:
        return f"convert its weights to safetensors (found {', '.join(others[:4])})"
    return "point target.model to a full model"
