"""Capture with the real SGLang on the CPU: in this process and over HTTP, by layers and by the model."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from eagle3_core.capture.job import EngineEndedError
from eagle3_core.capture.sglang_engine import SglangDriver, capture_with_sglang
from eagle3_core.capture.sglang_plan import check_settings, engine_arguments
from eagle3_core.capture.sglang_transport import HttpServer, InProcess
from eagle3_core.errors import CaptureError, HostError
from eagle3_core.store.dataset import Sample
from tests.capture.runs import make_samples
from tests.capture.sglang_capture import Session
from tests.ports import quiet_port
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.sglang

LENGTHS = [17 + (index * 13) % 90 for index in range(24)]
LONG = [300, 257]
"""Of four or five engine steps with 64 tokens each."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


def with_repeats(samples: list[Sample]) -> list[Sample]:
    """The samples, the long ones once more under other keys."""
    repeated = [replace(sample, key=f"{sample.key}-again") for sample in samples if len(sample) > 200]
    return [*samples, *repeated]


class InProcessRun:
    """One engine: foreign requests among the samples, then a sample with a wrong id, then a killed engine."""

    def __init__(self, root: Path, target: Path) -> None:
        samples = with_repeats(make_samples([*LENGTHS, *LONG]))
        self.session = session = Session.make(root, target, samples)
        *good, last = session.job.shards
        self.last = last.file_name
        self.engine = InProcess(engine_arguments(session.config, session.info, session.job, 300, "layers"))
        self.tokens: list[int] = []
        try:
            check_settings(self.engine.settings(), 300)
            driver = self._driver(iter(good))
            driver.check_hooks(1)
            foreign = [self.engine.send(f"foreign-{n}", samples[n].input_ids.tolist()) for n in range(3)]
            self.came = [shard for shard, _ in driver.run()]
            self.num_tokens = sum(self.tokens)
            self.foreign = [reply.result(120) for reply in foreign]
            self._send_wrong(last.start, iter([last]))
            self._kill()
        finally:
            self.engine.close()

    def _driver(self, shards: Iterator) -> SglangDriver:  # type: ignore[type-arg]
        session = self.session
        return SglangDriver(
            session.config, self.engine, session.job, session.samples, self.tokens.append,
            take=lambda: next(shards, None),
        )  # fmt: skip

    def _send_wrong(self, index: int, shards: Iterator) -> None:  # type: ignore[type-arg]
        right = self.session.samples[index]
        ids = right.input_ids.copy()
        ids[3] = 7 if ids[3] != 7 else 8
        self.session.samples[index] = replace(right, input_ids=ids)
        self.wrong = f"sample {right.key}: sglang-under-test ran token {ids[3]} at position 3"
        with pytest.raises(CaptureError) as caught:
            list(self._driver(shards).run())
        self.session.samples[index] = right
        self.message = str(caught.value)

    def _kill(self) -> None:
        (Path(self.session.job.folder) / "failure.json").unlink()
        before = set(self.session.job.journal.in_flight())  # the failure may have come before the last reply
        kill_scheduler(os.getpid())
        with pytest.raises(EngineEndedError) as caught:
            list(self._driver(iter(self.session.job.shards[:1])).run())
        self.death = str(caught.value)
        self.suspects = set(self.session.job.journal.in_flight()) - before


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, target: Path) -> InProcessRun:
    return InProcessRun(tmp_path_factory.mktemp("in-process"), target)


def test_every_layer_is_that_of_transformers_and_not_of_a_neighbour(in_process: InProcessRun) -> None:
    distances = list(in_process.session.distances(every=4))
    assert [layer.capture_id for layer in distances] == [2, 4, 5, 8]
    for layer in distances:
        assert layer.errors[:, layer.capture_id].max() < 1e-5
        assert layer.nearest_wrong_median > 0.05


def test_long_prompts_come_in_parts_and_repeated_ones_whole(in_process: InProcessRun) -> None:
    stored = {sample.key: sample for sample in in_process.session.stored()}
    long = [key for key in stored if key.endswith("-again")]
    assert long
    for key in long:
        again, once = stored[key], stored[key.removesuffix("-again")]
        assert len(once.input_ids) > 4 * 64 - 1
        assert (again.aux_states - once.aux_states).abs().max() < 1e-4
        assert (again.final_states - once.final_states).abs().max() < 1e-4


def test_foreign_requests_are_answered_and_leave_nothing_behind(in_process: InProcessRun) -> None:
    assert [reply["id"] for reply in in_process.foreign] == ["foreign-0", "foreign-1", "foreign-2"]
    samples, came = in_process.session.samples, sorted(in_process.came, key=lambda shard: shard.index)
    sent = [sample for shard in came for sample in samples[shard.start : shard.end]]
    assert len(came) == len(in_process.session.job.shards) - 1
    assert [sample.key for sample in in_process.session.stored()] == [sample.key for sample in sent]
    assert in_process.num_tokens == sum(map(len, sent))


def test_a_wrong_id_is_refused_by_name_and_its_shard_not_written(in_process: InProcessRun) -> None:
    assert in_process.wrong in in_process.message
    assert not (Path(in_process.session.job.folder) / in_process.last).exists()


def test_a_killed_scheduler_is_an_engine_that_ended_with_its_suspects_in_the_journal(
    in_process: InProcessRun,
) -> None:
    assert "a process of the SGLang engine ended" in in_process.death
    first = in_process.session.job.shards[0]
    assert in_process.suspects == {s.key for s in in_process.session.samples[first.start : first.end]}


def kill_scheduler(parent: int) -> None:
    children = psutil.Process(parent).children(recursive=True)
    scheduler = next(child for child in children if "scheduler" in " ".join(command_of(child)))
    os.kill(scheduler.pid, signal.SIGKILL)


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; nothing of one that has just ended."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


def test_over_http_the_models_own_capture_gives_the_same_states_and_a_dead_server_is_noticed(
    tmp_path: Path, target: Path
) -> None:
    port, samples = quiet_port(), make_samples([*LENGTHS[:8], 150])
    session = Session.make(tmp_path, target, samples)
    counted: list[int] = []
    arguments = engine_arguments(session.config, session.info, session.job, 150, "model")
    server = HttpServer(arguments, port, timeout_seconds=300)
    try:
        check_settings(server.settings(), 150)
        driver = SglangDriver(session.config, server, session.job, session.samples, counted.append)
        driver.check_hooks(2)
        assert len(list(driver.run())) == len(session.job.shards)
        assert sum(counted) == sum(map(len, samples))
        kill_scheduler(server.pid)
        with pytest.raises(EngineEndedError, match="the SGLang server"):
            list(SglangDriver(session.config, server, session.job, session.samples, counted.append).run())
    finally:
        server.close()
    for layer in session.distances(every=3):
        assert layer.errors[:, layer.capture_id].max() < 1e-5
        assert layer.nearest_wrong_median > 0.05
    deadline = time.monotonic() + 120
    while living_servers(port):
        assert time.monotonic() < deadline, "the server is still there"
        time.sleep(0.1)


def living_servers(port: int) -> list[int]:
    """Processes whose command names the port."""
    return [process.pid for process in psutil.process_iter() if str(port) in command_of(process)]


def test_a_port_on_which_somebody_listens_is_refused_before_loading(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3_core.capture.sglang_transport.subprocess", None)  # none can be started
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        session = Session.make(tmp_path, target, make_samples([20]), capture={"sglang_port": port})
        with pytest.raises(HostError, match=f"something listens on 127.0.0.1:{port} already"):
            list(capture_with_sglang(session.config, session.info, session.job, session.samples, len))


def test_sglangs_own_defaults_are_refused_for_the_radix_cache(target: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    defaults = vars(ServerArgs(model_path=str(target), device="cpu"))
    with pytest.raises(CaptureError, match="disable_radix_cache=False: shared prefixes"):
        check_settings(defaults, 100)
