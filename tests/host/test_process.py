"""The process runner with real processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eagle3_core.contracts import ProgressEvent, StepSpec, VerifyResult
from eagle3_core.errors import EXIT_STEP_FAILED, HostError, StepError
from eagle3_core.host.process import Supervisor, describe_status, run_step
from eagle3_core.host.process_tree import STEP_VARIABLE, ProcessId, end_orphans, end_processes
from eagle3_core.planning import plan_run
from eagle3_core.sections import EngineConfig
from tests.doubles.profile import stand_in_config

PATIENCE_SECONDS = 120.0
"""How long to wait for what comes soon; the sleeps of the stand-in's faults are longer."""
pytestmark = pytest.mark.orchestrator


def verify_spec(folder: Path, kind: str | None = None) -> StepSpec:
    """A spec of the stand-in's verify step, with a fault."""
    config = stand_in_config(folder, {"step": "verify", "kind": kind} if kind else None)
    plan = plan_run(config).artifacts["vocabulary"].model_copy(update={"kind": "verification"})
    return StepSpec(config=config, run_id="r", target_path="t", outputs={"verification": plan})


def run(spec: StepSpec, folder: Path, **options: object) -> VerifyResult:
    return run_step("verify", spec, engine=spec.config.engine, folder=folder, **options)  # type: ignore[arg-type]


def living_steps(token_of: int) -> list[psutil.Process]:
    """Processes of steps that this process (or process `token_of`) started."""
    found = []
    for process in psutil.process_iter():
        try:
            owner = process.environ().get(STEP_VARIABLE, "").partition(":")[0]
            if owner == str(token_of) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for(condition, seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether a condition comes to hold; it is looked at after the deadline too, which may pass unseen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def test_a_step_returns_its_typed_result_and_reports_lines_and_progress_apart(tmp_path):
    lines: list[str] = []
    events: list[ProgressEvent] = []
    result = run(verify_spec(tmp_path), tmp_path / "logs", on_line=lines.append, on_progress=events.append)
    assert isinstance(result, VerifyResult)
    assert result.agreement == 1.0
    assert "INFO stand-in verify begins" in lines
    assert not any("progress" in line for line in lines)
    assert [(event.done, event.total) for event in events] == [(0, 10), (10, 10)]
    assert events[-1].metrics == {"loss": 1.25}
    assert "INFO stand-in verify begins\n" in (tmp_path / "logs" / "verify.log").read_text()


def test_an_error_of_the_step_arrives_as_its_own_one_line(tmp_path):
    with pytest.raises(StepError) as caught:
        run(verify_spec(tmp_path, "user_error"), tmp_path / "logs")
    assert str(caught.value) == (
        "the stand-in does not like its data; give it other data; "
        f"full log: {tmp_path / 'logs' / 'verify.log'}"
    )
    assert caught.value.error_type == "DataError"
    assert caught.value.exit_code == EXIT_STEP_FAILED


def test_a_bug_names_its_type_and_keeps_the_traceback_in_the_log(tmp_path):
    with pytest.raises(StepError, match="RuntimeError: a bug in the stand-in") as caught:
        run(verify_spec(tmp_path, "bug"), tmp_path / "logs")
    assert "Traceback" not in str(caught.value)
    assert any("token-4711" in line for line in caught.value.tail)
    assert "Traceback (most recent call last)" in (tmp_path / "logs" / "verify.log").read_text()


def test_lines_right_before_a_sudden_exit_arrive(tmp_path):
    lines: list[str] = []
    with pytest.raises(StepError, match="exit code 1 without a result; its last line: token-before-exit"):
        run(verify_spec(tmp_path, "exit"), tmp_path / "logs", on_line=lines.append)
    assert lines[-1] == "token-before-exit"


def test_a_flood_of_lines_is_complete_in_order(tmp_path):
    lines: list[str] = []
    run(verify_spec(tmp_path, "flood"), tmp_path / "logs", on_line=lines.append)
    numbers = [line for line in lines if line.startswith("line ")]
    assert numbers == [f"line {number}" for number in range(5000)]


def test_a_killed_step_is_named_with_its_signal(tmp_path):
    with pytest.raises(StepError, match="step verify was killed by SIGKILL"):
        run(verify_spec(tmp_path, "kill"), tmp_path / "logs")


@pytest.mark.parametrize("kind", ["hang", "hang_ignoring_termination"])
def test_a_timeout_ends_the_step_and_its_grandchildren_of_other_sessions(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("eagle3_core.host.process.GRACE_SECONDS", 1.0)
    with pytest.raises(StepError, match="was ended after"):
        run(verify_spec(tmp_path, kind), tmp_path / "logs", timeout_seconds=3.0)
    assert living_steps(os.getpid()) == []


def test_a_process_that_has_ended_is_not_waited_for_until_somebody_reaps_it():
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    assert child.stdout.readline()
    started = time.monotonic()
    assert end_processes([psutil.Process(child.pid)], 2 * PATIENCE_SECONDS) == 1
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert child.wait() == -signal.SIGTERM


def test_an_exception_of_a_callback_ends_the_step(tmp_path):
    def stop(line: str) -> None:
        if line == "grandchild-ready":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(verify_spec(tmp_path, "hang"), tmp_path / "logs", on_line=stop)
    assert living_steps(os.getpid()) == []


def test_a_tick_that_raises_ends_a_silent_step(tmp_path):
    started = time.monotonic()

    def tick() -> None:
        if time.monotonic() - started > 1.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(verify_spec(tmp_path, "hang"), tmp_path / "logs", on_tick=tick)
    assert living_steps(os.getpid()) == []


def test_a_stray_that_holds_the_output_does_not_hold_up_a_finished_step(tmp_path):
    started = time.monotonic()
    run(verify_spec(tmp_path, "stray"), tmp_path / "logs")
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert living_steps(os.getpid()) == []


RUNNER = """
import sys
from pathlib import Path
from eagle3_core.contracts import StepSpec
from eagle3_core.host.process import run_step
spec = StepSpec.model_validate_json(Path(sys.argv[1]).read_text())
def tell(line):
    print(line, flush=True)
run_step("verify", spec, engine=spec.config.engine, folder=Path(sys.argv[2]), on_line=tell)
"""


def start_runner(tmp_path: Path, kind: str) -> subprocess.Popen[str]:
    """A process that runs a hanging step, ready when its grandchild is."""
    spec = tmp_path / "spec.json"
    spec.write_text(verify_spec(tmp_path, kind).model_dump_json())
    command = [sys.executable, "-c", RUNNER, str(spec), str(tmp_path / "logs")]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    assert any("grandchild-ready" in line for line in runner.stdout)
    return runner


def test_the_step_and_its_grandchildren_end_when_the_runner_is_killed(tmp_path):
    runner = start_runner(tmp_path, "hang")
    assert len(living_steps(runner.pid)) >= 2
    runner.kill()
    runner.wait()
    assert wait_for(lambda: not living_steps(runner.pid))


def test_orphans_of_a_runner_and_step_killed_together_are_ended_by_the_next_start(tmp_path):
    runner = start_runner(tmp_path, "hang")
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    steps = living_steps(runner.pid)
    grandchild = next(p for p in steps if "time.sleep(300)" in " ".join(p.cmdline()))
    for process in [p for p in steps if p != grandchild]:
        process.suspend()
    runner.kill()
    for process in [p for p in steps if p != grandchild]:
        process.kill()
    runner.wait()
    assert grandchild.is_running()
    assert grandchild.pid in end_orphans()
    assert wait_for(lambda: not living_steps(runner.pid))
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_healthy_step_is_no_orphan(tmp_path):
    runner = start_runner(tmp_path, "hang")
    assert not set(end_orphans()) & {process.pid for process in living_steps(runner.pid)}
    assert len(living_steps(runner.pid)) >= 2
    runner.send_signal(signal.SIGINT)
    runner.wait()
    assert wait_for(lambda: not living_steps(runner.pid))


def test_an_answer_that_a_process_did_not_live_to_read_is_no_error():
    command = [sys.executable, "-c", "import os; print('want', flush=True); os._exit(7)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    supervisor = Supervisor(process, "no-token")
    for _ in supervisor.lines(None, None):
        process.wait()
        process.stdin.write(b"3\n")
        with pytest.raises(BrokenPipeError):
            process.stdin.flush()
    assert supervisor.end() == 7


def test_a_missing_interpreter_is_an_error_with_a_remedy(tmp_path):
    engine = EngineConfig(python=str(tmp_path / "nowhere" / "python"))
    with pytest.raises(HostError, match=r"has no interpreter .*make setup"):
        run_step("verify", verify_spec(tmp_path), engine=engine, folder=tmp_path)


def test_a_log_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot write the log folder"):
        run(verify_spec(tmp_path), tmp_path / "file" / "logs")


def test_a_log_folder_removed_before_a_step_is_made_again(tmp_path):
    run(verify_spec(tmp_path), tmp_path / "gone" / "logs")
    assert (tmp_path / "gone" / "logs" / "verify.log").is_file()


def test_secrets_of_the_environment_stay_out_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "token-before-exit")
    with pytest.raises(StepError):
        run(verify_spec(tmp_path, "exit"), tmp_path / "logs")
    text = (tmp_path / "logs" / "verify.log").read_text()
    assert "token-before-exit" not in text
    assert "***" in text


def test_secrets_of_the_environment_stay_out_of_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_TOKEN", "does not like its data")
    with pytest.raises(StepError, match=r"the stand-in \*\*\*; give it other data"):
        run(verify_spec(tmp_path, "user_error"), tmp_path / "logs")


@pytest.mark.parametrize(
    ("kind", "secret", "kept"),
    [
        ("bug", "a bug in the stand-in", 'raise RuntimeError(\\"***\\")'),
        ("user_error", "does not like its data", "the stand-in ***; give it other data"),
        ("bad_states", "has 1 NaN and 0 Inf", "capture id 4 ***"),
    ],
)
def test_secrets_of_the_environment_stay_out_of_the_result_file(tmp_path, monkeypatch, kind, secret, kept):
    monkeypatch.setenv("SOME_API_TOKEN", secret)
    with pytest.raises(StepError):
        run(verify_spec(tmp_path, kind), tmp_path / "logs")
    text = (tmp_path / "logs" / "verify.result.json").read_text()
    assert secret not in text
    assert kept in text


def test_statuses_are_described():
    assert describe_status(3) == "ended with exit code 3"
    assert describe_status(-9) == "was killed by SIGKILL (out of memory?)"
    assert describe_status(-11) == "was killed by SIGSEGV"


def test_a_process_id_knows_whether_its_process_lives():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    text = (Path("/proc") / str(child.pid) / "stat").read_text()
    ticks = int(text.rpartition(")")[2].split()[19])
    mine = ProcessId.current()
    theirs = mine.model_copy(update={"pid": child.pid, "start_ticks": ticks})
    reused = theirs.model_copy(update={"start_ticks": ticks + 1})
    elsewhere = reused.model_copy(update={"namespace": "pid:[1]"})
    assert [p.is_gone() for p in (mine, theirs, reused, elsewhere)] == [False, False, True, False]
    child.kill()
    child.wait()
    assert theirs.is_gone()
    assert ProcessId.parse(str(theirs)) == theirs
    assert ProcessId.parse("nonsense") is None


def test_a_process_is_not_taken_for_gone_by_one_that_has_no_descriptor_left(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    process = ProcessId.current()
    gone = process.model_copy(update={"start_ticks": 1})
    monkeypatch.setattr(Path, "read_text", refuse)
    assert not process.is_gone()
    assert not gone.is_gone()
    with pytest.raises(OSError, match="Too many open files"):
        ProcessId.current()


def test_a_process_of_another_host_is_not_taken_for_gone(monkeypatch):
    gone = ProcessId.current().model_copy(update={"start_ticks": 1})
    assert gone.is_gone()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert not gone.is_gone()
