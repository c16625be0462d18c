"""The foreign formats by name, and how each counts layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.capture.formats.folder import FolderWriter, ForeignFolder
from eagle3_core.capture.formats.speculators import SpeculatorsFolder, SpeculatorsWriter
from eagle3_core.capture.formats.speculators_v1 import SpeculatorsV1Folder, SpeculatorsV1Writer
from eagle3_core.contracts import ForeignFormat
from eagle3_core.target.layers import check_capture_ids, from_layer_outputs, to_layer_outputs


@dataclass(frozen=True)
class Format:
    """One foreign format.

    Attributes:
        reader: opens a folder.
        writer: begins a folder, given the layers in the format's counting.
        to_capture_ids: translates its layer ids, given the target's number of layers.
        from_capture_ids: the other way.
    """

    reader: Callable[[Path], ForeignFolder]
    writer: Callable[[Path, tuple[int, ...]], FolderWriter]
    to_capture_ids: Callable[[Sequence[int], int], tuple[int, ...]]
    from_capture_ids: Callable[[Sequence[int]], tuple[int, ...]]


FORMATS: dict[ForeignFormat, Format] = {
    "speculators-v1": Format(SpeculatorsV1Folder, SpeculatorsV1Writer, from_layer_outputs, to_layer_outputs),
    "speculators": Format(SpeculatorsFolder, SpeculatorsWriter, check_capture_ids, tuple),
}
