"""Captures on a disk that is too small: refused, paused at the reserve, failed by policy, gone on with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from eagle3_core.artifacts import ArtifactPlan
from eagle3_core.capture import extract
from eagle3_core.capture.job import PAUSED_NAME
from eagle3_core.capture.shard_queue import Staging
from eagle3_core.contracts import ExtractResult, StepSpec
from eagle3_core.errors import DiskFullError, StoreError
from eagle3_core.estimate.run import check_space, estimate_run
from eagle3_core.host.engine_info import EngineVersions
from eagle3_core.planning import RunPlan
from eagle3_core.step import Progress
from eagle3_core.store import disk
from eagle3_core.store.dataset import Sample, content_hash
from eagle3_core.store.files import file_problem, temporary_files
from eagle3_core.store.local import LocalStore
from eagle3_core.store.shards import ShardReader
from eagle3_core.target.info import inspect_target
from tests.capture.runs import capture_folder, capture_spec, make_samples
from tests.disks import SmallDisk, small_disk
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.engine

STATES = 102_400_000
"""1,000 samples of 200 tokens, hidden 64, bf16, three auxiliary states and every final one."""
MIB = 1 << 20
UNCHECKED = {"check_disk": False, "min_free_disk_gib": 0}


class Watched(Progress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__("extract")
        self.reasons: list[str | None] = []

    def pause(self, reason: str | None) -> None:
        self.reasons.append(reason)

    @property
    def paused(self) -> str | None:
        return self.reasons[-1] if self.reasons else None


class Running:
    """A step in a thread."""

    def __init__(self, spec: StepSpec) -> None:
        self.progress = Watched()
        self._result: ExtractResult | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(spec,))
        self._thread.start()

    def _run(self, spec: StepSpec) -> None:
        try:
            self._result = extract.run(spec, self.progress)
        except Exception as error:
            self._error = error

    def wait_for(self, condition: Callable[[], Any], seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._error is None, self._error
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def result(self) -> ExtractResult:
        self._thread.join(400)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), hidden_size=64)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("eagle3_core.capture.replica.SESSION_MODULE", "tests.capture.faulty_session")
    monkeypatch.setattr(disk, "POLL_SECONDS", 0.1)
    monkeypatch.setenv("FAULT_ENGINE", "random")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SmallDisk]:
    """60 % of what the capture needs."""
    with small_disk(tmp_path / "store", round(0.6 * STATES)) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples([200] * 1000)


def spec_of(root: Path, target: Path, samples: list[Sample], **limits: Any) -> StepSpec:
    capture = {"engine": "reference", "shard_bytes": 8 * MIB, "final_state": "all"}
    return capture_spec(
        root, target, samples, capture=capture, limits=UNCHECKED | limits,
        target={"model": str(target), "dtype": "bfloat16"},
    )  # fmt: skip


def check_whole(spec: StepSpec, samples: list[Sample]) -> None:
    """Every sample is there once, in order, and every file is what its manifest says."""
    store = LocalStore(spec.config.store_path)
    manifest = store.read(spec.outputs["capture"].ref)
    assert not store.problems(manifest)
    folder = capture_folder(spec)
    keys = [key for entry in manifest.files for key in ShardReader(folder / entry.path).keys]
    assert keys == [sample.key for sample in samples]


def check_finished_shards(spec: StepSpec) -> int:
    """What is visible is whole; returns how many shards that is."""
    folder = capture_folder(spec)
    manifest = LocalStore(spec.config.store_path).find(spec.outputs["capture"].ref)
    entries = manifest.files if manifest else ()
    assert not [problem for entry in entries if (problem := file_problem(folder, entry))]
    visible = {path.name for path in folder.glob("*.safetensors")}
    assert {entry.path for entry in entries} <= visible
    for name in visible:
        assert len(ShardReader(folder / name)) > 0
    return len(visible)


def test_the_plan_names_the_bytes_and_refuses(
    tmp_path: Path, target: Path, samples: list[Sample], store: SmallDisk
) -> None:
    """102,400,000 bytes of states, and at most 5 % more in shards."""
    spec = spec_of(tmp_path, target, samples, check_disk=True)
    dataset = ArtifactPlan(kind="dataset", identity={"content": content_hash(samples)})
    plan = RunPlan(
        config=spec.config,
        target_path=target,
        target=inspect_target(target),
        versions=EngineVersions(python="3", packages={}),
        store=LocalStore(spec.config.store_path),
        artifacts={"dataset": dataset, "capture": spec.outputs["capture"]},
    )
    estimate = estimate_run(plan, ["extract"])
    assert estimate.state_bytes == STATES
    (capture,) = (one for one in estimate.artifacts if one.kind == "capture")
    assert STATES < capture.new_bytes <= 1.05 * STATES
    said = rf"does not fit on {store.path}: it needs {estimate.file_systems[0].need_bytes:,} bytes"
    with pytest.raises(DiskFullError, match=said) as caught:
        check_space(estimate)
    assert "the smallest change that makes it fit: " in str(caught.value)
    limit = next(one for one in estimate.options if "--limit" in one.change)
    assert 500 < int(limit.change.split("`")[1].split()[1]) < 600


def test_a_capture_that_does_not_fit_is_refused_before_an_engine_is_loaded(
    tmp_path: Path, target: Path, samples: list[Sample], store: SmallDisk
) -> None:
    spec = spec_of(tmp_path, target, samples, check_disk=True)
    with pytest.raises(
        DiskFullError, match=r"^no space: 6\d,\d{3},\d{3} bytes free on .* 10\d,\d{3},\d{3} needed"
    ):
        extract.run(spec, Watched())
    assert not Staging(LocalStore(spec.config.store_path), spec.outputs["capture"].ref).sessions.exists()


def test_it_pauses_at_the_reserve_with_whole_shards_only_and_goes_on_when_the_disk_has_grown(
    tmp_path: Path, target: Path, samples: list[Sample], store: SmallDisk
) -> None:
    reserve = 10 * MIB
    spec = spec_of(tmp_path, target, samples, min_free_disk_gib=reserve / (1 << 30))
    running = Running(spec)
    running.wait_for(lambda: running.progress.paused)
    assert "needed above the reserve" in str(running.progress.paused)
    assert str(running.progress.paused).startswith("paused: no space: ")
    running.wait_for(lambda: not temporary_files(store.path))
    assert 4 <= check_finished_shards(spec) <= 6
    assert disk.free_disk_bytes(store.path) >= reserve
    store.resize(STATES + 40 * MIB)
    result = running.result()
    assert (running.progress.paused, result.num_restarts, result.captured_tokens) == (None, 0, 200_000)
    check_whole(spec, samples)


def test_a_disk_that_is_really_full_costs_no_engine_and_no_sample(
    tmp_path: Path, target: Path, samples: list[Sample], store: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step believes that there is space, so the session runs into the end of the disk."""
    monkeypatch.setattr(disk.DiskGuard, "has_room", lambda *_: True)
    spec = spec_of(tmp_path, target, samples)
    running = Running(spec)
    running.wait_for(lambda: running.progress.paused)
    running.wait_for(lambda: not temporary_files(store.path))
    assert check_finished_shards(spec) >= 5
    store.resize(STATES + 40 * MIB)
    result = running.result()
    assert (result.num_restarts, result.captured_tokens) == (0, 200_000)
    check_whole(spec, samples)


def test_an_engine_that_dies_while_it_waits_for_space_convicts_no_sample(
    tmp_path: Path, target: Path, samples: list[Sample], store: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.DiskGuard, "has_room", lambda *_: True)
    spec = spec_of(tmp_path, target, samples)
    running = Running(spec)
    folders = Staging(LocalStore(spec.config.store_path), spec.outputs["capture"].ref).sessions
    running.wait_for(lambda: list(folders.glob(f"*/{PAUSED_NAME}")))  # the step itself may be sooner
    sessions = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(part.startswith(str(store.path)) for part in process.info["cmdline"] or [])
    ]
    assert len(sessions) == 1
    sessions[0].kill()
    store.resize(STATES + 40 * MIB)
    result = running.result()
    assert (result.num_restarts, result.quarantined) == (0, [])
    check_whole(spec, samples)


@pytest.mark.parametrize("is_really_full", [False, True])
def test_by_policy_it_fails_with_one_line_instead_and_can_be_gone_on_with(
    tmp_path: Path, target: Path, samples: list[Sample], store: SmallDisk,
    monkeypatch: pytest.MonkeyPatch, is_really_full: bool,
) -> None:  # fmt: skip
    spec = spec_of(tmp_path, target, samples, on_full_disk="fail")
    with monkeypatch.context() as blind:
        if is_really_full:
            blind.setattr(disk.DiskGuard, "has_room", lambda *_: True)
        with pytest.raises(DiskFullError, match=r"^no space: .* for (shard-0000\d|man).*; make") as caught:
            extract.run(spec, Watched())
    assert "\n" not in str(caught.value)
    made = check_finished_shards(spec)
    assert made >= 4
    assert not temporary_files(store.path)
    store.resize(STATES + 40 * MIB)
    assert extract.run(spec, Watched()).num_new_shards == 13 - made
    check_whole(spec, samples)


def test_a_pause_that_lasts_too_long_ends_the_step(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No root is needed: the free space is made up."""
    monkeypatch.setattr(disk, "free_disk_bytes", lambda path: MIB)
    spec = spec_of(tmp_path, target, make_samples([200] * 40), pause_timeout_minutes=0.02)
    with pytest.raises(DiskFullError, match=r"for 0\.02 minutes \(limits\.pause_timeout_minutes\)"):
        extract.run(spec, Watched())


def test_it_goes_on_by_itself_when_somebody_else_makes_room(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [MIB]
    monkeypatch.setattr(disk, "free_disk_bytes", lambda path: free[0])
    samples = make_samples([200] * 120)
    spec = spec_of(tmp_path, target, samples)
    running = Running(spec)
    running.wait_for(lambda: running.progress.paused)
    free[0] = 100 * MIB
    assert running.result().num_shards == 2
    check_whole(spec, samples)


def test_a_read_only_store_is_one_clear_line_and_the_step_goes_on_when_it_is_mended(
    tmp_path: Path, target: Path, store: SmallDisk
) -> None:
    samples = make_samples([200] * 120)
    spec = spec_of(tmp_path, target, samples)
    store.make_read_only()
    said = rf"^cannot write into {store.path}/\S+ \(Read-only file system\); .*; check the mount"
    with pytest.raises(StoreError, match=said):
        extract.run(spec, Watched())
    store.make_read_only(False)
    extract.run(spec, Watched())
    check_whole(spec, samples)


def test_made_up_samples_need_what_was_promised(samples: list[Sample]) -> None:
    assert sum(len(sample) for sample in samples) * 64 * 2 * 4 == STATES
    assert np.all([len(sample) == 200 for sample in samples])
