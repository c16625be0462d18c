"""Engines that die, hang or kill themselves on a sample, and several engines on one queue; all for real."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eagle3_core.artifacts import FileEntry
from eagle3_core.capture import extract, verify
from eagle3_core.capture.shard_queue import ShardQueue, Staging
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.contracts import ExtractResult, StepOutcome, StepSpec
from eagle3_core.errors import CaptureError, StoreError
from eagle3_core.host.engine_environment import engine_environment
from eagle3_core.step import Progress
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import ShardReader
from tests.capture.runs import capture_folder, capture_spec, make_samples, verify_spec
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

SAMPLES = make_samples([20, 31, 16, 40, 25, 18, 33, 22, 27, 30])
TWO_EACH = {"engine": "reference", "shard_bytes": 120_000}
"""Five shards of two samples."""
PROGRESS = Progress("extract")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3_core.capture.replica.SESSION_MODULE", "tests.capture.faulty_session")
    monkeypatch.setenv("FAULT_ENGINE", "random")


def spec_of(root: Path, target: Path, **capture: object) -> StepSpec:
    return capture_spec(root, target, SAMPLES, capture=TWO_EACH | capture)


def entries(spec: StepSpec) -> tuple[FileEntry, ...]:
    return LocalStore(spec.config.store_path).read(spec.outputs["capture"].ref).files


def stored_keys(spec: StepSpec) -> list[list[str]]:
    return [ShardReader(path).keys for path in sorted(capture_folder(spec).glob("*.safetensors"))]


def test_an_engine_killed_in_the_third_shard_of_five_is_replaced_and_four_shards_are_made_once(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once").write_text("sample-005")
    monkeypatch.setenv("FAULT_ONCE", str(tmp_path / "once"))
    spec = spec_of(tmp_path, target)
    result = extract.run(spec, PROGRESS)
    assert (result.num_shards, result.num_new_shards, result.num_restarts) == (5, 5, 1)
    assert (result.num_samples, result.quarantined) == (10, [])
    assert result.captured_tokens == sum(map(len, SAMPLES))
    assert [entry.facts["attempts"] for entry in entries(spec)] == [1, 1, 2, 1, 1]
    assert stored_keys(spec) == [[s.key for s in SAMPLES[i : i + 2]] for i in range(0, 10, 2)]
    assert not (Path(spec.config.store_path) / "staging" / spec.outputs["capture"].ref.id).exists()


def test_samples_that_kill_the_engine_twice_are_named_and_left_out_and_the_others_are_all_there(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_KILLS", "sample-006,sample-007")
    monkeypatch.setenv("FAULT_ENGINE", "reference")
    data = {"generation": {"temperature": 1.0}}
    spec = capture_spec(tmp_path, target, SAMPLES, capture=TWO_EACH, data=data)
    result = extract.run(spec, PROGRESS)
    assert [one.key for one in result.quarantined] == ["sample-006", "sample-007"]
    assert "killed by SIGKILL" in result.quarantined[0].reason
    assert (result.num_samples, result.num_restarts) == (8, 4)
    kept = [s.key for s in SAMPLES if s.key not in ("sample-006", "sample-007")]
    assert stored_keys(spec) == [kept[0:2], kept[2:4], kept[4:6], [], kept[6:8]]
    again = extract.run(spec, PROGRESS)
    assert (again.num_new_shards, again.quarantined) == (0, result.quarantined)
    verified = verify.run(verify_spec(spec), Progress("verify"))
    assert verified.num_samples == 8
    assert [bad.key for bad in verified.bad_samples] == ["sample-006", "sample-007"]
    assert verified.bad_samples[0].problem.startswith("quarantined: killed")


def test_more_quarantined_samples_than_the_limit_end_the_stage(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_KILLS", "sample-003")
    spec = spec_of(tmp_path, target, max_quarantined_samples=0)
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"1 samples kill the engine .*max_quarantined_samples"):
            extract.run(spec, PROGRESS)


def test_a_limit_that_was_lowered_meanwhile_holds_for_what_is_quarantined_already(
    tmp_path: Path, target: Path
) -> None:
    spec = spec_of(tmp_path, target, max_quarantined_samples=0)
    Staging(LocalStore(spec.config.store_path), spec.outputs["capture"].ref).quarantine("sample-003", "why")
    with pytest.raises(CaptureError, match=r"1 samples kill the engine \(sample-003\)"):
        extract.run(spec, PROGRESS)


def test_an_engine_that_dies_of_every_sample_convicts_none(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_KILLS", ",".join(sample.key for sample in SAMPLES))
    spec = spec_of(tmp_path, target)
    with pytest.raises(CaptureError, match=r"died of sample-000, .* each alone, and computed no sample"):
        extract.run(spec, PROGRESS)
    assert not Staging(LocalStore(spec.config.store_path), spec.outputs["capture"].ref).quarantined()


def test_shards_of_quarantined_samples_alone_are_written_without_an_engine(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_LOAD", "dies")
    spec = spec_of(tmp_path, target, max_quarantined_samples=len(SAMPLES))
    staging = Staging(LocalStore(spec.config.store_path), spec.outputs["capture"].ref)
    for sample in SAMPLES:
        staging.quarantine(sample.key, "killed it")
    result = extract.run(spec, PROGRESS)
    assert (result.num_shards, result.num_samples, result.num_restarts) == (5, 0, 0)
    assert stored_keys(spec) == [[]] * 5


def test_an_engine_that_never_loads_ends_the_stage_with_the_last_reason(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_LOAD", "dies")
    monkeypatch.setattr("eagle3_core.capture.pool.MAX_FRUITLESS_DEATHS", 2)
    with pytest.raises(CaptureError, match=r"died 2 times in a row .*SIGSEGV"):
        extract.run(spec_of(tmp_path, target), PROGRESS)


def test_an_error_of_any_length_arrives_and_ends_the_stage_at_once(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_LOAD", "complains")
    with pytest.raises(CaptureError, match=r"^the engine takes none of ü+$"):
        extract.run(spec_of(tmp_path, target), PROGRESS)


def test_nothing_is_left_of_a_session_whose_shard_could_not_be_published(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        raise StoreError("the store is gone")

    monkeypatch.setattr(ShardQueue, "publish", refuse)
    spec = spec_of(tmp_path, target)
    with pytest.raises(StoreError, match="the store is gone"):
        extract.run(spec, PROGRESS)
    staging = Staging(LocalStore(spec.config.store_path), spec.outputs["capture"].ref)
    assert staging.sessions.is_dir()
    assert list(staging.sessions.iterdir()) == []


def test_a_load_that_hangs_is_ended_after_its_time(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_LOAD", "hangs")
    monkeypatch.setattr("eagle3_core.capture.pool.MAX_FRUITLESS_DEATHS", 1)
    with pytest.raises(CaptureError, match=r"did not load in 0\.1 minutes"):
        extract.run(spec_of(tmp_path, target, load_timeout_minutes=0.1), PROGRESS)
    assert not _sessions(tmp_path)


def test_an_engine_that_hangs_is_replaced(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hang").write_text("sample-004")
    monkeypatch.setenv("FAULT_STALLS", str(tmp_path / "hang"))
    result = extract.run(spec_of(tmp_path, target, stall_timeout_minutes=0.2), PROGRESS)
    assert (result.num_restarts, result.num_samples) == (1, 10)


def test_two_engines_share_one_queue_and_each_shard_is_made_once(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_SECONDS", "0.5")
    spec = spec_of(tmp_path, target, replicas=2)
    result = extract.run(spec, PROGRESS)
    assert (result.num_new_shards, result.captured_tokens) == (5, sum(map(len, SAMPLES)))
    assert [entry.facts["attempts"] for entry in entries(spec)] == [1] * 5


@pytest.mark.parametrize(("replicas", "can_go_on"), [(2, True), (1, False)])
def test_an_engine_that_could_not_be_loaded_beside_others_is_loaded_once_more(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, can_go_on: bool
) -> None:
    (tmp_path / "port").touch()
    monkeypatch.setenv("FAULT_PORT", str(tmp_path / "port"))
    spec = spec_of(tmp_path, target, replicas=replicas)
    if can_go_on:
        assert extract.run(spec, PROGRESS).num_new_shards == 5
    else:
        with pytest.raises(CaptureError, match="the port is taken"):
            extract.run(spec, PROGRESS)


def test_engines_that_can_never_be_loaded_end_the_stage(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAULT_LOAD", "complains")
    with pytest.raises(CaptureError, match="the engine takes none of"):
        extract.run(spec_of(tmp_path, target, replicas=2), PROGRESS)
    assert 1 <= caplog.text.count("it is loaded once more") <= 2


def start_step(spec: StepSpec, root: Path, name: str, **faults: str) -> subprocess.Popen[bytes]:
    (root / f"{name}.json").write_text(spec.model_dump_json())
    code = (
        "import sys; from eagle3_core import step; from eagle3_core.capture import replica; "
        "replica.SESSION_MODULE = 'tests.capture.faulty_session'; sys.exit(step.main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, "extract", str(root / f"{name}.json"), str(root / f"{name}.result")],
        cwd=PROJECT_ROOT,
        env=engine_environment(spec.config.engine) | faults,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def outcome(root: Path, name: str) -> ExtractResult:
    found = StepOutcome.model_validate_json((root / f"{name}.result").read_text())
    assert found.status == "ok", found
    return ExtractResult.model_validate(found.result)


def test_two_runs_on_one_store_make_each_shard_once_and_both_get_the_result(
    tmp_path: Path, target: Path
) -> None:
    spec = spec_of(tmp_path, target)
    both = [start_step(spec, tmp_path, name, FAULT_SECONDS="0.4") for name in ("first", "second")]
    assert [process.wait(300) for process in both] == [0, 0]
    assert outcome(tmp_path, "first") == outcome(tmp_path, "second")
    assert [entry.facts["attempts"] for entry in entries(spec)] == [1] * 5


def test_the_other_run_finishes_when_the_leading_one_is_killed(tmp_path: Path, target: Path) -> None:
    """Both are at work when it is killed: each holds a shard."""
    spec, held = spec_of(tmp_path, target), tmp_path / "go on"
    first = start_step(spec, tmp_path, "first", FAULT_HOLDS=str(held))
    staging = Path(spec.config.store_path) / "staging" / spec.outputs["capture"].ref.id
    _wait_for(lambda: any((staging / "entries").glob("*.json")))
    second = start_step(spec, tmp_path, "second", FAULT_HOLDS=str(held))
    _wait_for(lambda: len(list((staging / "claims").glob("*.claim"))) == 2)
    assert len(_sessions(tmp_path)) == 2
    first.kill()
    first.wait()
    held.touch()
    assert second.wait(300) == 0
    assert outcome(tmp_path, "second").num_samples == 10
    _wait_for(lambda: not _sessions(tmp_path))


def _wait_for(condition, seconds: float = 240.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _sessions(root: Path) -> list[psutil.Process]:
    """Engine sessions of captures below a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "tests.capture.faulty_session" in command and command[-1].startswith(str(root)):
            found.append(process)
    return found
