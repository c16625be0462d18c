"""Captures with a real SGLang and what it is compared with, for the tests on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3_core.capture.compare import LayerDistances, layer_distances
from eagle3_core.capture.job import CaptureJob, capture_layout
from eagle3_core.capture.reference import ReferenceModel
from eagle3_core.config import RunConfig
from eagle3_core.store.dataset import Sample, read_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import CapturedSample, ShardReader, plan_shards
from eagle3_core.target.info import TargetInfo, inspect_target
from tests.capture.runs import capture_spec


@dataclass
class Session:
    """A job over a dataset in a folder, as the step `extract` makes one."""

    config: RunConfig
    info: TargetInfo
    samples: list[Sample]
    job: CaptureJob

    @classmethod
    def make(cls, root: Path, folder: Path, samples: Sequence[Sample], **sections: Any) -> Session:
        """A session over `samples`; `sections` override the run's configuration."""
        capture = {"engine": "sglang", "shard_bytes": 256 << 10, "max_batched_tokens": 64}
        sections["capture"] = capture | sections.get("capture", {})
        spec = capture_spec(root, folder, samples, **sections)
        dataset = LocalStore(spec.config.store_path).folder(spec.inputs["dataset"])
        info, stored = inspect_target(folder), read_dataset(dataset)
        layout = capture_layout(spec.config, info)
        (root / "session").mkdir()
        job = CaptureJob(
            engine="sglang-under-test",
            dataset_folder=str(dataset),
            folder=str(root / "session"),
            layout=layout,
            shards=tuple(plan_shards(stored, layout, int(spec.config.capture.shard_bytes))),
        )
        return cls(spec.config, info, stored, job)

    def stored(self) -> list[CapturedSample]:
        """The captured samples of all shards that are there, in order."""
        paths = sorted(Path(self.job.folder).glob("*.safetensors"))
        return [sample for path in paths for sample in ShardReader(path)]

    def distances(self, every: int = 1, device: str = "cpu") -> Iterator[LayerDistances]:
        """Of every captured layer of some samples, to all layers of a transformers forward."""
        chosen = self.stored()[::every]
        model = ReferenceModel(self.info, self.job.layout.dtype, device)
        references = [model.all_states(sample.input_ids).cpu() for sample in chosen]
        rows = [torch.arange(len(sample.input_ids)) for sample in chosen]
        for place, capture_id in enumerate(self.job.layout.aux_layer_ids):
            states = [sample.aux_states[:, place] for sample in chosen]
            yield layer_distances(capture_id, states, rows, references)
        final, last = [sample.final_states for sample in chosen], self.job.layout.final_layer_id
        yield layer_distances(last, final, [sample.final_rows for sample in chosen], references)
