"""How many engines run side by side, what each gets and when one stands still; no engine and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3_core.capture import replica
from eagle3_core.capture.job import CaptureJob
from eagle3_core.capture.replica import Replica, SessionHooks, num_replicas, replica_variables
from eagle3_core.capture.session import EVENT_PREFIX
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError
from eagle3_core.store.shards import ShardLayout


def config(capture: dict[str, object], tensor_parallel_size: int = 1) -> RunConfig:
    engine = {"device": "cuda", "tensor_parallel_size": tensor_parallel_size}
    return RunConfig.model_validate(
        {"name": "t", "target": {"model": "m"}, "capture": capture, "engine": engine}
    )


@pytest.mark.parametrize(
    ("capture", "size", "num_gpus", "expected"),
    [
        ({}, 1, 4, 4),
        ({}, 2, 5, 2),
        ({"replicas": 3}, 1, 4, 3),
        ({"engine": "sglang"}, 2, 4, 2),
        ({"engine": "sglang", "sglang_port": 30000}, 1, 4, 1),
        ({"engine": "vllm", "sglang_port": 30000}, 1, 4, 4),
    ],
)
def test_engines_fill_the_gpus_unless_a_number_is_set_or_all_would_serve_on_one_port(
    capture: dict[str, object], size: int, num_gpus: int, expected: int
) -> None:
    assert num_replicas(config(capture, size), [str(index) for index in range(num_gpus)]) == expected


def test_each_engine_gets_gpus_of_its_own_as_they_are_named() -> None:
    variables = replica_variables(config({}, 2), 2, ["4", "5", "GPU-a", "GPU-b", "7"])
    assert [one["CUDA_VISIBLE_DEVICES"] for one in variables] == ["4,5", "GPU-a,GPU-b"]


def test_more_engines_than_the_gpus_hold_are_refused() -> None:
    with pytest.raises(CaptureError, match="3 GPUs are visible; expected 4 for 2 engines of 2 GPUs each"):
        replica_variables(config({"replicas": 2}, 2), 2, ["0", "1", "2"])


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Watched:
    """A session whose engine is silent, and a step that looks at it when told."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        run = config({"load_timeout_minutes": 1, "stall_timeout_minutes": 1})
        layout = ShardLayout((2, 4, 5), 8, 16, "float32", "all")
        job = CaptureJob(engine="e", dataset_folder="", folder=str(folder), layout=layout, shards=())
        hooks = SessionHooks(
            take=lambda: None, written=lambda shard: None, tokens=lambda count: None,
            loaded=lambda: None, check=lambda: None, paused=lambda reason: None,
        )  # fmt: skip
        process: Any = SimpleNamespace()
        self._watch = replica._Watch(Replica(0, run, "", {}), process, job, hooks, run)
        self._clock = clock

    def say_loaded(self) -> None:
        self._watch.handle(f"{EVENT_PREFIX}{json.dumps({'event': 'loaded'})}")

    def look(self, seconds: int) -> None:
        """As often as the step does while so much time passes."""
        for _ in range(2 * seconds):
            self._clock.now += 0.5
            self._watch.tick()


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    clock = Clock()
    monkeypatch.setattr("eagle3_core.host.running_clock.time", clock)
    return Watched(tmp_path, clock)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_engine_is_given_up_when_it_was_silent_for_long(watched: Watched, is_loaded: bool) -> None:
    if is_loaded:
        watched.say_loaded()
    watched.look(60)
    message = "returned nothing for 1 minutes" if is_loaded else "did not load in 1 minutes"
    with pytest.raises(replica._SessionTimeoutError, match=message):
        watched.look(1)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_time_in_which_the_step_itself_waited_or_stood_still_is_not_the_engines(
    watched: Watched, is_loaded: bool
) -> None:
    """As while a finished shard's place is on a full disk, or the run was stopped with Ctrl-Z."""
    if is_loaded:
        watched.say_loaded()
    watched.look(30)
    watched._clock.now += 3600
    watched.look(28)
    with pytest.raises(replica._SessionTimeoutError):
        watched.look(2)
