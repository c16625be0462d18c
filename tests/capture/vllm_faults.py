"""Drives the capture engine, in processes of its own, through requests that go wrong; prints JSON.

`python -m tests.capture.vllm_faults SPEC`: requests that name no sample, one of them aborted, among the
samples, then a sample whose ids differ from the dataset's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from eagle3_core.capture.job import CaptureJob, capture_layout
from eagle3_core.capture.vllm_engine import VllmDriver, capture_with_vllm
from eagle3_core.contracts import StepSpec
from eagle3_core.errors import CaptureError
from eagle3_core.step import end_process
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import plan_shards
from eagle3_core.target.info import inspect_target


def main(spec: StepSpec) -> None:
    """Capture with faults and print which shards came and what the error said."""
    store = LocalStore(spec.config.store_path)
    folder = store.folder(spec.inputs["dataset"])
    samples, info = read_dataset(folder), inspect_target(Path(spec.target_path))
    layout = capture_layout(spec.config, info)
    shards = plan_shards(samples, layout, int(spec.config.capture.shard_bytes))
    job = CaptureJob(
        engine="vllm-under-test",
        dataset_folder=str(folder),
        folder=str(store.folder(spec.outputs["capture"].ref)),
        layout=layout,
        shards=tuple(shards),
    )
    sent = list(samples)
    changed = sent[-1].input_ids.copy()
    changed[3] = 7 if changed[3] != 7 else 8
    sent[-1] = replace(sent[-1], input_ids=changed)
    VllmDriver.run = run_with_intruders  # type: ignore[method-assign]
    came, message = [], None
    try:
        for shard, _ in capture_with_vllm(spec.config, info, job, sent, lambda count: None):
            came.append(shard.file_name)
    except CaptureError as error:
        message = str(error)
    print(json.dumps({"came": came, "message": message, "last": shards[-1].file_name}), flush=True)


original_run = VllmDriver.run


def run_with_intruders(self: VllmDriver):  # type: ignore[no-untyped-def]
    """The driver's run after two requests that name no sample, one of them aborted."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=self._samples[0].input_ids.tolist())
    for name in ("aborted", "foreign"):
        self._engine.add_request(name, prompt, SamplingParams(max_tokens=3, temperature=0.0))
    self._engine.abort_request(["aborted"])
    yield from original_run(self)


if __name__ == "__main__":
    main(StepSpec.model_validate_json(Path(sys.argv[1]).read_text()))
    end_process(0)
