"""The data folder of speculators 0.5 and later: an Arrow dataset, and a file of states for each of its rows.

    FOLDER/data-00000-of-00001.arrow   columns input_ids, loss_mask, seq_len
    FOLDER/dataset_info.json, state.json
    FOLDER/hidden_states/hs_{row}.safetensors    hidden_states [S, L, H], token_ids [S]

It is what its offline generation leaves and its trainer reads. Layers are counted as vLLM counts them, which
is as we do; the last one is the final layer's output before the final norm. The files do not name the layers,
except those that this project writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from eagle3_core.capture.formats.folder import ForeignText, numbered_files
from eagle3_core.errors import DataError
from eagle3_core.store.dataset import Sample
from eagle3_core.store.files import atomic_file, write_atomic

STATES_FOLDER = "hidden_states"
FILE_PATTERN = r"hs_(\d+)\.safetensors"
SCALES = "hidden_states_scales"
ARROW_NAME = "data-00000-of-00001.arrow"
STATE_NAME = "state.json"
INFO_NAME = "dataset_info.json"
LAYERS_KEY = "capture_ids"
REQUIRED = ("input_ids", "loss_mask")


class SpeculatorsFolder:
    """Reads such a folder.

    Raises:
        DataError: no dataset, rows that are missing, there twice or too many.
    """

    def __init__(self, folder: Path) -> None:
        self._table = _read_table(folder)
        self._files = numbered_files(folder / STATES_FOLDER, FILE_PATTERN)
        if len(self._files) != self._table.num_rows:
            raise DataError(
                f"{folder / STATES_FOLDER} has {len(self._files)} files, the dataset beside it "
                f"{self._table.num_rows} rows",
                expected="one file for each row",
                remedy="generate the missing states, or import the rows that have some",
            )
        with self._open(0) as file:
            named = (file.metadata() or {}).get(LAYERS_KEY)
        self.layer_ids = tuple(json.loads(named)) if named else None

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
            DataError: states and dataset are of other tokens.
        """
        values = {name: self._table.column(name)[row].as_py() for name in self._table.column_names}
        ids = np.array(values["input_ids"], np.int64)
        tokens = self._tensor(row, "token_ids").long().numpy()
        if not np.array_equal(ids, tokens):
            raise DataError(
                f"{self._files[row]} has states of {len(tokens)} tokens that are not those of row {row} of "
                f"the dataset, which has {len(ids)}",
                remedy="generate its states anew",
            )
        return ForeignText(
            source=self.source(row),
            input_ids=ids,
            loss_mask=np.array(values["loss_mask"], np.int64),
            key=values.get("key"),
            split=values.get("split"),
        )

    def states(self, row: int) -> torch.Tensor:
        """States [S, L, H] of a row.

        Raises:
            DataError: the file cannot be read, or holds states in FP8.
        """
        with self._open(row) as file:
            if SCALES in set(file.keys()):
                raise DataError(
                    f"{self._files[row]} holds states in FP8",
                    expected="the target's dtype",
                    remedy="generate them with the backend `file`",
                )
        states = self._tensor(row, "hidden_states")
        if states.ndim != 3:
            raise DataError(
                f"{self._files[row]} has states of the shape {list(states.shape)}",
                expected="[tokens, layers, hidden size]",
            )
        return states

    def _tensor(self, row: int, name: str) -> torch.Tensor:
        with self._open(row) as file:
            if name not in set(file.keys()):
                raise DataError(f"{self._files[row]} has no {name}", remedy="check --format")
            return file.get_tensor(name)

    def _open(self, row: int) -> Any:
        try:
            return safe_open(str(self._files[row]), framework="pt")
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"{self._files[row]} cannot be read ({error})", remedy="generate it anew"
            ) from error


class SpeculatorsWriter:
    """Writes such a folder; its trainer ignores the columns `key` and `split`."""

    def __init__(self, folder: Path, layer_ids: tuple[int, ...]) -> None:
        self._folder, self._layer_ids = folder, layer_ids
        self._rows: list[Sample] = []

    def add(self, row: int, sample: Sample, states: torch.Tensor) -> None:
        """Write one row with states [S, L, H], the final layer last."""
        tensors = {
            "hidden_states": states.contiguous(),
            "token_ids": torch.from_numpy(sample.input_ids).long(),
        }
        metadata = {LAYERS_KEY: json.dumps(list(self._layer_ids))}
        with atomic_file(self._folder / STATES_FOLDER / f"hs_{row}.safetensors") as handle:
            handle.write(save(tensors, metadata))
        self._rows.append(sample)

    def finish(self) -> None:
        """Write the Arrow dataset."""
        table = pa.table(
            {
                "input_ids": pa.array([row.input_ids for row in self._rows], pa.list_(pa.int64())),
                "loss_mask": pa.array([row.loss_mask for row in self._rows], pa.list_(pa.int64())),
                "seq_len": pa.array([len(row) for row in self._rows], pa.int64()),
                "key": pa.array([row.key for row in self._rows], pa.string()),
                "split": pa.array([row.split for row in self._rows], pa.string()),
            }
        )
        with atomic_file(self._folder / ARROW_NAME) as handle, pa.ipc.new_stream(handle, table.schema) as out:
            out.write_table(table)
        write_atomic(self._folder / INFO_NAME, json.dumps({"features": _features()}, indent=1))
        write_atomic(self._folder / STATE_NAME, json.dumps(_state(), indent=1))


def _read_table(folder: Path) -> pa.Table:
    """The rows of a dataset that Hugging Face's `save_to_disk` wrote."""
    try:
        state = json.loads((folder / STATE_NAME).read_text())
        parts = [pa.ipc.open_stream(pa.memory_map(str(folder / part["filename"]))).read_all()
                 for part in state["_data_files"]]  # fmt: skip
        table = pa.concat_tables(parts)
    except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"{folder} has no dataset that can be read ({error})",
            expected=f"{STATE_NAME} and its Arrow files beside the folder {STATES_FOLDER}",
        ) from error
    missing = [name for name in REQUIRED if name not in table.column_names]
    if missing or state.get("_indices_data_files"):
        what = f"lacks the columns {missing}" if missing else "is a selection of rows"
        raise DataError(f"the dataset in {folder} {what}", remedy="save it anew")
    return table


def _features() -> dict[str, Any]:
    whole = {"dtype": "int64", "_type": "Value"}
    text = {"dtype": "string", "_type": "Value"}
    numbers = {"feature": whole, "_type": "List"}
    return {"input_ids": numbers, "loss_mask": numbers, "seq_len": whole, "key": text, "split": text}


def _state() -> dict[str, Any]:
    """What `datasets.load_from_disk` reads first: with the format torch rows come as tensors."""
    return {
        "_data_files": [{"filename": ARROW_NAME}],
        "_fingerprint": "0" * 16,
        "_format_columns": ["input_ids", "loss_mask", "seq_len"],
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
