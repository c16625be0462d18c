"""The step `extract` with the reference engine: what is stored, resumed, refused and remade."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3_core.capture import extract
from eagle3_core.capture.job import capture_layout
from eagle3_core.capture.shard_queue import Staging
from eagle3_core.contracts import ExtractResult, ProgressEvent, StepOutcome, StepSpec
from eagle3_core.errors import EXIT_USER_ERROR, CaptureError, DiskFullError, TargetError
from eagle3_core.report.figures import format_bytes
from eagle3_core.step import PROGRESS_PREFIX, Progress
from eagle3_core.store.files import write_atomic
from eagle3_core.store.local import MANIFEST_NAME, LocalStore
from eagle3_core.store.locks import folder_lock
from eagle3_core.store.shards import PlannedShard, ShardReader, shard_file_bytes
from eagle3_core.target.info import inspect_target
from tests.capture.runs import capture_folder, capture_spec, make_samples
from tests.python_path import python_path
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

SAMPLES = make_samples([20, 31, 16, 40, 25, 18, 33, 22])
ONE_SHARD_EACH = {"engine": "reference", "shard_bytes": 4096}
PROGRESS = Progress("extract")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, target: Path) -> tuple[StepSpec, ExtractResult]:
    """A finished capture, one sample a shard, and what its step said."""
    spec = capture_spec(tmp_path_factory.mktemp("made"), target, SAMPLES, capture=ONE_SHARD_EACH)
    return spec, extract.run(spec, PROGRESS)


@pytest.fixture
def finished(made: tuple[StepSpec, ExtractResult], tmp_path: Path, target: Path) -> StepSpec:
    """A copy of it that a test may damage."""
    shutil.copytree(made[0].config.store_path, tmp_path / "store")
    spec = capture_spec(tmp_path, target, SAMPLES, capture=ONE_SHARD_EACH)
    assert LocalStore(spec.config.store_path).is_intact(spec.outputs["capture"].ref)
    return spec


def stamps(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.glob("*.safetensors"))}


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("eagle3_core.capture.pool.EnginePool.start", refuse)


def test_each_stored_state_is_the_one_that_the_convention_names(tmp_path: Path, target: Path) -> None:
    spec = capture_spec(tmp_path, target, SAMPLES, capture={"engine": "reference", "final_state": "all"})
    result = extract.run(spec, PROGRESS)
    assert (result.num_samples, result.num_tokens) == (8, 205)
    assert result.captured_tokens == 205
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    stored = [s for p in sorted(capture_folder(spec).glob("*.safetensors")) for s in ShardReader(p)]
    assert [s.key for s in stored] == [s.key for s in SAMPLES]
    for sample in stored:
        with torch.no_grad():
            output = model(input_ids=sample.input_ids.long()[None], output_hidden_states=True)
        for place, capture_id in enumerate((2, 4, 5)):
            torch.testing.assert_close(
                sample.aux_states[:, place], output.hidden_states[capture_id][0], rtol=1e-5, atol=1e-5
            )
        normed = model.model.norm(sample.final_states)
        torch.testing.assert_close(normed, output.hidden_states[8][0], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(sample.final_states, output.hidden_states[8][0], rtol=1e-2, atol=1e-2)
        logits = model.lm_head(normed)
        assert torch.equal(logits.argmax(-1), output.logits[0].argmax(-1))
        assert (logits - output.logits[0]).abs().max() < 1e-4


def test_the_manifest_is_complete_and_the_staging_folder_gone(made: tuple[StepSpec, ExtractResult]) -> None:
    spec, result = made
    manifest = LocalStore(spec.config.store_path).read(spec.outputs["capture"].ref)
    assert manifest.facts["result"] == result.model_dump(mode="json")
    assert len(manifest.files) == result.num_shards == 8
    assert sum(entry.facts["num_tokens"] for entry in manifest.files) == 205
    assert result.bytes == manifest.bytes
    names = {path.name for path in capture_folder(spec).iterdir()}
    assert names == {"manifest.json", *(entry.path for entry in manifest.files)}
    assert not list((spec.config.store_path / "staging").iterdir())


def interrupt(spec: StepSpec, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Run until `after` shards are recorded, then be interrupted."""
    original = extract._Count.shard_done

    def failing(self: extract._Count, shard: PlannedShard) -> None:
        original(self, shard)
        if self.num_new_shards >= after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(extract._Count, "shard_done", failing)
        with pytest.raises(KeyboardInterrupt):
            extract.run(spec, PROGRESS)


def test_a_resumed_capture_makes_only_what_is_missing(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at five of ten: the five stay as they are, and the manifest then names all ten."""
    samples = make_samples([20, 31, 16, 40, 25, 18, 33, 22, 19, 28])
    spec = capture_spec(tmp_path, target, samples, capture=ONE_SHARD_EACH)
    folder = capture_folder(spec)
    assert not folder.exists()
    interrupt(spec, monkeypatch, after=5)
    store, ref = LocalStore(spec.config.store_path), spec.outputs["capture"].ref
    manifest = store.find(ref)
    assert manifest is not None
    assert (manifest.state, len(manifest.files)) == ("partial", 5)
    before = {entry.path: stamps(folder)[entry.path] for entry in manifest.files}
    result = extract.run(spec, PROGRESS)
    assert (result.num_shards, result.num_samples) == (10, 10)
    assert result.num_new_shards <= 5
    assert {name: stamps(folder)[name] for name in before} == before
    names = [f"shard-{index:05d}.safetensors" for index in range(10)]
    assert [entry.path for entry in store.read(ref).files] == names == list(stamps(folder))


def test_a_step_of_which_every_save_fails_ends_with_an_error_and_leaves_no_shard(
    tmp_path: Path, target: Path
) -> None:
    """No file may grow beyond a few bytes in the step's process: each write of a shard fails."""
    spec = capture_spec(tmp_path, target, SAMPLES, capture=ONE_SHARD_EACH)
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    limit = 16 << 10
    assert all(shard_file_bytes([sample], capture_layout(spec.config, inspect_target(target))) > limit
               for sample in SAMPLES)  # fmt: skip
    held_open, by_us = os.pipe()  # a step whose standard input ends, ends
    done = subprocess.run(
        [sys.executable, "-m", "eagle3_core.step", "extract", "spec.json", "result.json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": python_path(), "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        stdin=held_open,
        capture_output=True,
        text=True,
    )
    os.close(held_open)
    os.close(by_us)
    assert done.returncode == EXIT_USER_ERROR
    outcome = StepOutcome.model_validate_json((tmp_path / "result.json").read_text())
    assert outcome.failure is not None
    assert "File too large" in outcome.failure.message
    assert not list(capture_folder(spec).glob("*"))


def test_the_last_event_of_progress_names_every_shard_and_the_bytes_of_all(
    tmp_path: Path, target: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = capture_spec(tmp_path, target, SAMPLES, capture=ONE_SHARD_EACH)
    result = extract.run(spec, Progress("extract"))
    *_, last = [line for line in capfd.readouterr().out.splitlines() if line.startswith(PROGRESS_PREFIX)]
    event = ProgressEvent.model_validate_json(last.removeprefix(PROGRESS_PREFIX))
    assert (event.done, event.total) == (205, 205)
    assert event.message == f"8 of 8 shards, {format_bytes(result.bytes)}"
    assert event.metrics == {"tokens_per_second": result.tokens_per_second}


def test_a_finished_capture_is_left_as_it_is_and_no_engine_is_started(
    finished: StepSpec, no_engine: None
) -> None:
    before = stamps(capture_folder(finished))
    result = extract.run(finished, PROGRESS)
    assert (result.num_new_shards, result.captured_tokens, result.tokens_per_second) == (0, 0, None)
    assert stamps(capture_folder(finished)) == before


def test_damaged_and_missing_shards_are_remade_alone_and_alike(
    finished: StepSpec, caplog: pytest.LogCaptureFixture
) -> None:
    spec = finished
    folder = capture_folder(spec)
    paths, before = sorted(folder.glob("*.safetensors")), stamps(folder)
    whole = [path.read_bytes() for path in paths]
    one_bit = whole[4][:-9] + bytes([whole[4][-9] ^ 1]) + whole[4][-8:]
    damages = [whole[0][:-1], whole[1][:4], b"", whole[3] + b"\0", one_bit]
    for path, content in zip(paths, damages, strict=False):
        path.write_bytes(content)
    paths[5].unlink()
    store = LocalStore(spec.config.store_path)
    problems = store.problems(store.read(spec.outputs["capture"].ref))
    assert list(problems) == [path.name for path in paths[:6]]
    result = extract.run(spec, PROGRESS)
    assert result.num_new_shards == 6
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert told == [f"{problem}: made again" for problem in problems.values()]
    after = stamps(folder)
    assert {name: content for name, (_, content) in after.items()} == {
        name: content for name, (_, content) in before.items()
    }
    assert after[paths[6].name] == before[paths[6].name]
    assert store.is_intact(spec.outputs["capture"].ref)


def test_who_takes_the_lead_makes_a_damaged_shard_again_that_it_had_thought_finished(
    finished: StepSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = finished
    folder = capture_folder(spec)
    manifest = folder / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace('"complete"', '"partial"'))
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    caplog.set_level("INFO")
    lead, leader = extract._Work._lead, contextlib.ExitStack()
    leader.enter_context(folder_lock(folder))

    attempts: list[bool] = []

    def lead_once_the_leader_is_gone(work: extract._Work) -> bool:
        attempts.append(lead(work))
        assert len(attempts) < 20, "waits for ever"
        if len(attempts) == 3:
            leader.close()
        return attempts[-1]

    monkeypatch.setattr(extract._Work, "_lead", lead_once_the_leader_is_gone)
    result = extract.run(spec, PROGRESS)
    assert attempts == [False, False, False, True]
    assert caplog.text.count("another process leads") == 1
    assert (result.num_shards, result.num_new_shards) == (len(SAMPLES), 1)
    assert LocalStore(spec.config.store_path).is_intact(spec.outputs["capture"].ref)


def test_a_shard_damaged_before_the_manifest_named_it_is_made_again_with_a_warning(
    finished: StepSpec, caplog: pytest.LogCaptureFixture
) -> None:
    store, ref = LocalStore(finished.config.store_path), finished.outputs["capture"].ref
    manifest = store.read(ref)
    lost, *others = manifest.files
    partial = manifest.model_copy(update={"state": "partial", "files": tuple(others)})
    (store.folder(ref) / MANIFEST_NAME).write_text(partial.model_dump_json())
    path = store.folder(ref) / lost.path
    path.write_bytes(path.read_bytes()[:-1])
    write_atomic(Staging(store, ref).path / "entries" / f"{path.stem}.json", lost.model_dump_json())
    assert extract.run(finished, PROGRESS).num_new_shards == 1
    assert f"{path} has {lost.bytes - 1:,} bytes, its manifest says {lost.bytes:,}: made again" in caplog.text
    assert store.is_intact(ref)


def test_other_layer_ids_get_a_folder_of_their_own(tmp_path: Path, target: Path, finished: StepSpec) -> None:
    first = finished
    before = stamps(capture_folder(first))
    second = capture_spec(
        tmp_path, target, SAMPLES, capture=ONE_SHARD_EACH,
        target={"dtype": "float32", "aux_layer_ids": [1, 3, 6]},
    )  # fmt: skip
    assert second.outputs["capture"].ref != first.outputs["capture"].ref
    mixed = second.model_copy(update={"outputs": first.outputs})
    with pytest.raises(CaptureError, match=r"aux_layer_ids \[2, 4, 5\] \(now \[1, 3, 6\]\)"):
        extract.run(mixed, PROGRESS)
    assert stamps(capture_folder(first)) == before


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "dtype float32 (now bfloat16)"),
        ("weights", "target "),
        ("tokens", "content "),
    ],
)
def test_a_half_done_capture_goes_on_only_with_what_it_was_begun_with(
    tmp_path: Path, target: Path, what: str, message: str, no_engine: None
) -> None:
    begun = capture_spec(tmp_path, target, SAMPLES, capture=ONE_SHARD_EACH)
    folder, samples, dtype = target, SAMPLES, "bfloat16" if what == "dtype" else "float32"
    if what == "weights":
        folder = make_tiny_target(tmp_path / "retrained", seed=1)
    if what == "tokens":  # another max_length or another template
        samples = make_samples([20, 31, 16, 40, 25, 18, 33, 21])
    now = capture_spec(tmp_path, folder, samples, capture=ONE_SHARD_EACH, target={"dtype": dtype})
    assert now.outputs["capture"].ref != begun.outputs["capture"].ref
    with pytest.raises(CaptureError, match=re.escape(message)):
        extract.run(now.model_copy(update={"outputs": begun.outputs}), PROGRESS)
    assert not capture_folder(begun).exists()


def test_what_cannot_be_captured_is_refused_before_a_model_is_loaded(
    tmp_path: Path, target: Path, no_engine: None
) -> None:
    with pytest.raises(CaptureError, match="no samples"):
        extract.run(capture_spec(tmp_path / "none", target, []), PROGRESS)
    with pytest.raises(CaptureError, match="more than one sample with the key 'sample-000'"):
        extract.run(capture_spec(tmp_path / "twice", target, [*SAMPLES, SAMPLES[0]]), PROGRESS)
    with pytest.raises(DiskFullError, match="bytes free"):
        extract.run(capture_spec(tmp_path, target, SAMPLES, limits={"min_free_disk_gib": 1e9}), PROGRESS)
    with pytest.raises(TargetError, match="0 to 7"):
        capture_spec(tmp_path, target, SAMPLES, target={"dtype": "float32", "aux_layer_ids": [2, 4, 99]})
