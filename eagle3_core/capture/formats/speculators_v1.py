"""The folder of speculators v1: a `data_{row}.pt` for each sample.

Each file is a dictionary that `torch.save` wrote: `input_ids` [S], `loss_mask` [S] and `hidden_states`, a
list of one tensor [S, H] for each layer, the last one the final layer's output before the final norm. Layers
are counted "after layer i" (`target.layers` translates); `data_config.json` beside them may name them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3_core.capture.formats.folder import ForeignText, numbered_files
from eagle3_core.errors import DataError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import atomic_file, write_atomic

FILE_PATTERN = r"data_(\d+)\.pt"
CONFIG_NAME = "data_config.json"
REQUIRED = ("input_ids", "loss_mask", "hidden_states")


class SpeculatorsV1Folder:
    """Reads such a folder; files are mapped, so looking at the tokens reads no states.

    Raises:
        DataError: no such files, rows that are missing or there twice.
    """

    def __init__(self, folder: Path) -> None:
        self._files = numbered_files(folder, FILE_PATTERN)
        self.layer_ids = _named_layers(folder / CONFIG_NAME)

    @property
    def num_samples(self) -> int:
        """Its rows."""
        return len(self._files)

    def source(self, row: int) -> str:
        """The file of a row."""
        return str(self._files[row])

    def text(self, row: int) -> ForeignText:
        """Tokens and loss mask of a row.

        Raises:
            DataError: the file cannot be read or lacks something.
        """
        path, found = self._load(row)
        return ForeignText(
            source=str(path),
            input_ids=np.asarray(found["input_ids"]),
            loss_mask=np.asarray(found["loss_mask"]).astype(np.int64),
            key=found.get("key"),
            split=found.get("split"),
        )

    def states(self, row: int) -> torch.Tensor:
        """States [S, L, H] of a row.

        Raises:
            DataError: as `text`, or layers of different shapes.
        """
        path, found = self._load(row)
        layers = found["hidden_states"]
        shapes = {tuple(layer.shape) for layer in layers}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise DataError(f"{path} has layers of the shapes {sorted(shapes)}", expected="one shape [S, H]")
        return torch.stack(list(layers), dim=1)

    def _load(self, row: int) -> tuple[Path, dict[str, Any]]:
        path = self._files[row]
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # torch.load raises what zip files, pickles and storages raise
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{path} cannot be read ({reason})", remedy="generate it anew") from error
        if not isinstance(found, dict) or any(name not in found for name in REQUIRED):
            keys = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise DataError(f"{path} holds {keys}", expected=f"a dictionary with {', '.join(REQUIRED)}")
        return path, found


class SpeculatorsV1Writer:
    """Writes such a folder, with the keys and splits of the samples in each file besides."""

    def __init__(self, folder: Path, layer_ids: tuple[int, ...]) -> None:
        self._folder, self._layer_ids = folder, layer_ids

    def add(self, row: int, sample: Sample, states: torch.Tensor) -> None:
        """Write one row with states [S, L, H], the final layer last."""
        document = {
            "input_ids": torch.from_numpy(sample.input_ids).long(),
            "loss_mask": torch.from_numpy(sample.loss_mask).bool(),
            "hidden_states": [layer.contiguous() for layer in states.unbind(dim=1)],
            "key": sample.key,
            "split": sample.split,
        }
        with atomic_file(self._folder / f"data_{row}.pt") as handle:
            torch.save(document, handle)

    def finish(self) -> None:
        """Name the layers, in the format's own counting."""
        write_atomic(self._folder / CONFIG_NAME, json.dumps({"layer_ids": list(self._layer_ids)}, indent=1))


def _named_layers(path: Path) -> tuple[int, ...] | None:
    """The layer ids that the generator has noted, at the top or below `hidden_states`."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if not isinstance(document, dict):
        return None
    section = document.get("hidden_states")
    found = document.get("layer_ids") or (section.get("layer_ids") if isinstance(section, dict) else None)
    return tuple(int(layer) for layer in found) if found else None
