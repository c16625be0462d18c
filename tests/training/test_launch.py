"""A rank that fails or is killed ends training with its name, and no process is left."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eagle3_core.contracts import ProgressEvent
from eagle3_core.errors import ConfigError, RankError, TrainingError
from eagle3_core.host import process, running_clock
from eagle3_core.host.process_tree import ProcessId, ProcessTree
from eagle3_core.step import Progress
from eagle3_core.target.info import TargetInfo
from eagle3_core.training import launch, train
from tests.training.examples import make_config, make_samples
from tests.training.runs import SAVE_ALWAYS, Quiet, folder_of, spec_of

pytestmark = pytest.mark.engine
WAIT_SECONDS = 200.0
"""Far less than an odd rank's ten minutes."""
SETTINGS = {"pack_tokens": 32, "packs_per_step": 2, "num_ranks": 2, "checkpoint_every_seconds": SAVE_ALWAYS}


def ranks_left() -> list[int]:
    """Children of this process that are ranks."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # one that is no rank may just have ended
            if "odd_rank" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


@pytest.fixture
def make_odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], Path]:
    """Lets rank 1 do something at a step; returns the file that it makes then. See `odd_rank`."""

    def make(step: int, deed: str) -> Path:
        stamp = tmp_path / "stamp"
        monkeypatch.setattr(launch, "RANK_MODULE", "tests.training.odd_rank")
        monkeypatch.setenv("ODD_RANK", f"1 {step} {deed}")
        monkeypatch.setenv("ODD_STAMP", str(stamp))
        return stamp

    return make


@pytest.fixture
def sees_rank_1_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches rank 1 has its turn when all is known of rank 0."""
    run = launch._Rank.run

    def after_rank_0(lines: Iterator[str]) -> Iterator[str]:
        yield from lines
        for thread in threading.enumerate():
            if thread.name == "rank-0":
                thread.join(WAIT_SECONDS)

    def watched(self: launch._Rank) -> None:
        if self.rank == 1:
            lines = self.supervisor.lines
            self.supervisor.lines = lambda *rest: after_rank_0(lines(*rest))  # type: ignore[method-assign]
        run(self)

    monkeypatch.setattr(launch._Rank, "run", watched)


@pytest.mark.usefixtures("sees_rank_1_last")
@pytest.mark.parametrize(
    ("step", "deed", "message"),
    [
        (0, "raise", r"rank 1 of 2 failed: RuntimeError: this rank is odd"),
        (3, "kill", r"rank 1 of 2 was killed by SIGKILL \(out of memory\?\)"),
    ],
)
def test_a_rank_that_fails_or_is_killed_ends_all_and_is_named(
    step: int,
    deed: str,
    message: str,
    tmp_path: Path,
    tiny_target: TargetInfo,
    make_odd: Callable[[int, str], Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    stamp = make_odd(step, deed)
    spec = spec_of(tmp_path, tiny_target, make_samples(tiny_target, 8, 3), train=SETTINGS)
    with pytest.raises(RankError, match=message) as raised:
        train.run(spec, Quiet())  # type: ignore[arg-type]
    assert time.time() - stamp.stat().st_mtime < WAIT_SECONDS
    assert raised.value.details["rank"] == 1
    assert ranks_left() == []
    assert not (folder_of(spec) / "manifest.json").exists()
    assert (folder_of(spec) / "resume.json").is_file() == (step > 0)
    if deed == "raise":
        assert "RuntimeError: this rank is odd" in raised.value.details["last_lines"][-1]
        assert "[rank 1] RuntimeError: this rank is odd" in capfd.readouterr().out


def test_warnings_of_every_rank_are_in_the_log_with_its_number_and_those_of_all_once(
    tmp_path: Path,
    tiny_target: TargetInfo,
    make_odd: Callable[[int, str], Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    make_odd(2, "log")
    spec = spec_of(tmp_path, tiny_target, make_samples(tiny_target, 8, 3), train=SETTINGS)
    train.run(spec, Quiet())  # type: ignore[arg-type]
    lines = capfd.readouterr().out.splitlines()
    tokens = [line for line in lines if "eagle3_core.odd: token of level" in line]
    assert [line[-2:] for line in tokens] == ["30", "40"]
    assert all(line.startswith("[rank 1] ") for line in tokens)
    assert sum("step 2 has loss" in line and "odd to all" in line for line in lines) == 1


def test_a_rank_that_cannot_be_watched_any_more_ends_training(
    tmp_path: Path,
    tiny_target: TargetInfo,
    make_odd: Callable[[int, str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_odd(1, "hang")

    def update(self: ProcessTree) -> None:
        if threading.current_thread().name == "rank-1":
            raise OSError("no descriptor is left")

    monkeypatch.setattr(ProcessTree, "update", update)
    monkeypatch.setattr(process, "TREE_UPDATE_SECONDS", 0.0)
    spec = spec_of(tmp_path, tiny_target, make_samples(tiny_target, 8, 3), train=SETTINGS)
    message = (
        r"rank 1 of 2 .*; its last line: it cannot be watched any more \(OSError: no descriptor is left\)"
    )
    with pytest.raises(RankError, match=message):
        train.run(spec, Quiet())  # type: ignore[arg-type]
    assert ranks_left() == []


def test_ranks_that_do_no_step_are_ended_and_say_where_they_stand(
    tmp_path: Path,
    tiny_target: TargetInfo,
    make_odd: Callable[[int, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stamp = make_odd(3, "hang")
    stands_still = launch._Group._stands_still

    def from_the_stamps_on(self: launch._Group) -> bool:
        if not (stamp.exists() and Path(f"{stamp}-0").exists()):
            self._still_seconds = 0.0
        return stands_still(self)

    monkeypatch.setattr(launch._Group, "_stands_still", from_the_stamps_on)
    settings = SETTINGS | {"stall_timeout_minutes": 0.1}
    spec = spec_of(tmp_path, tiny_target, make_samples(tiny_target, 8, 3), train=settings)
    with pytest.raises(RankError, match=r"the 2 ranks have done no step for 0\.1 minutes") as raised:
        train.run(spec, Quiet())  # type: ignore[arg-type]
    assert 5 < time.time() - stamp.stat().st_mtime < WAIT_SECONDS
    assert ranks_left() == []
    assert (folder_of(spec) / "resume.json").is_file()
    last_lines = raised.value.details["last_lines"]
    assert any("odd_rank.py" in line and line.endswith(" in act") for line in last_lines[1])
    assert any("optimizer_step.py" in line for line in last_lines[0])
    assert "odd_rank.py" in capfd.readouterr().out


def test_only_ranks_between_two_steps_can_stand_still() -> None:
    group = launch._Group(Progress("train"), stall_seconds=-1.0)
    event = ProgressEvent(step="train", done=1, total=9, unit="steps")
    seen = [group._stands_still()]
    for update in (
        {"done": 3, "total": 5, "unit": "shards"},
        {},
        {"is_paused": True},
        {},
        {"done": 9},
        {},
        {"done": 0, "total": 2, "unit": "files"},
    ):
        group._report(event.model_copy(update=update))
        seen.append(group._stands_still())
    assert seen == [False, False, True, False, True, False, True, False]


def test_time_in_which_a_host_was_suspended_is_not_one_in_which_its_ranks_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, passed = 0.0, iter([1.0, 3600.0, *[1.0] * 7])

    def get(timeout: float) -> None:
        nonlocal now
        now += next(passed)
        raise queue.Empty

    monkeypatch.setattr(running_clock, "time", SimpleNamespace(monotonic=lambda: now))
    group = launch._Group(Progress("train"), stall_seconds=9.0)
    monkeypatch.setattr(group, "_events", SimpleNamespace(get=get))
    group._report(ProgressEvent(step="train", done=1, total=9, unit="steps"))
    seen = []
    for _ in range(9):
        group._receive(1.0)
        seen.append(group._stands_still())
    assert seen == [False] * 8 + [True]


def test_what_all_ranks_find_wrong_is_raised_as_without_ranks(
    tmp_path: Path, tiny_target: TargetInfo
) -> None:
    samples = make_samples(tiny_target, 8, 3)
    spec = spec_of(tmp_path, tiny_target, samples, train=SETTINGS)
    samples[0].input_ids[0] = tiny_target.vocab_size
    other = spec_of(tmp_path / "other", tiny_target, samples, train=SETTINGS)
    spec = spec.model_copy(update={"inputs": other.inputs, "config": other.config})
    with pytest.raises(TrainingError, match=r"^the dataset has token id 300; expected ids below"):
        train.run(spec, Quiet())  # type: ignore[arg-type]


def test_more_ranks_than_packs_or_gpus_are_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"num_ranks is 4, but packs_per_step is 2"):
        make_config(train={"num_ranks": 4, "packs_per_step": 2})
    with pytest.raises(ConfigError, match=r"muon steps whole matrices"):
        make_config(train={"optimizer": "muon", "parallel": "fsdp2"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    config = make_config(engine={"device": "cuda"}, train={"num_ranks": 4, "packs_per_step": 8})
    with pytest.raises(TrainingError, match=r"train.num_ranks is 4, but 2 GPUs are visible"):
        launch.count_ranks(config)


def test_every_gpu_that_can_have_a_pack_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))

    def count(**settings: int) -> int:
        return launch.count_ranks(make_config(engine={"device": "cuda"}, train=settings))

    assert [count(packs_per_step=packs) for packs in (1, 2, 8)] == [1, 2, 3]
    assert count(packs_per_step=8, num_ranks=2) == 2
    variables = launch.rank_variables(make_config(engine={"device": "cuda"}), 2)
    share = {"OMP_NUM_THREADS": "8"}
    assert variables == [share | {"CUDA_VISIBLE_DEVICES": "0"}, share | {"CUDA_VISIBLE_DEVICES": "3"}]
    assert launch.count_ranks(make_config(train={"packs_per_step": 8})) == 1


def test_the_next_training_removes_what_a_killed_one_left_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = ProcessId.current().model_copy(update={"start_ticks": 1})
    owners = {"dead": gone, "alive": ProcessId.current()}
    folders = {name: tmp_path / f"{launch.FOLDER_PREFIX}{owner}-x1_y" for name, owner in owners.items()}
    for folder in (*folders.values(), tmp_path / f"{launch.FOLDER_PREFIX}somebody"):
        folder.mkdir()
    launch.remove_folders_of_the_dead()
    assert {path.name for path in tmp_path.iterdir()} == {
        folders["alive"].name,
        f"{launch.FOLDER_PREFIX}somebody",
    }
