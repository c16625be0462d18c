"""The way of a team: a Prefect server, a process worker, `eagle3 deploy`, `prefect deployment run`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import yaml

from eagle3_core.config import PROJECT_ROOT, STAGES
from eagle3_core.errors import EXIT_OK
from eagle3_core.host.run_folder import find_run
from tests.doubles.profile import stand_in_profile
from tests.e2e.tiny_run import tiny_profile
from tests.host.test_process import living_steps, wait_for
from tests.ports import quiet_port

pytestmark = [pytest.mark.orchestrator, pytest.mark.slow]

SECONDS = 500.0
PREFECT = [sys.executable, "-m", "prefect"]


class Site:
    """A server and a worker of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        port = quiet_port()
        self.variables = os.environ | {
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "COLUMNS": "200",
        }
        self.server_command = ["server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
        self.log = home / "processes.log"

    @contextlib.contextmanager
    def background(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A `prefect` command that runs until the block ends."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*PREFECT, *arguments],
                cwd=self.home,
                env=self.variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            end_tree(process)

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run([*PREFECT, *arguments])

    def eagle3(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, "-m", "flows.cli", *arguments], cwd=PROJECT_ROOT)

    def client(self):
        from prefect.client.orchestration import SyncPrefectClient

        return SyncPrefectClient(self.variables["PREFECT_API_URL"])

    def _run(self, command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd or self.home,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )


def end_tree(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs([psutil.Process(process.pid), *children], timeout=10)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("site"))
    with site.background(*site.server_command), site.client() as client:
        assert wait_for(lambda: client.api_healthcheck() is None, SECONDS), site.log.read_text()
        yield site


@pytest.fixture(scope="module")
def deployed(site, tiny_folder, tiny_target):
    """Deployments of a tiny run, registered twice, the schedule enabled in between, and a worker.

    Its engines run in processes of their own, as they do on GPUs.
    """
    profile = tiny_profile(
        tiny_folder, tiny_target, engine={"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
    )
    deploy(site, profile)
    with site.client() as client:
        nightly = names(client)["nightly"]
        (schedule,) = nightly.schedules
        assert (schedule.schedule.cron, schedule.active) == ("0 2 * * *", False)
        client.update_deployment_schedule(nightly.id, schedule.id, active=True)
    deploy(site, profile)
    with site.background("worker", "start", "--pool", "eagle3"):
        yield profile


def deploy(site, profile):
    done = site.eagle3("deploy", "--profile", str(profile))
    assert done.returncode == EXIT_OK, done.stderr


def names(client):
    return {deployment.name: deployment for deployment in client.read_deployments()}


def test_deploying_twice_leaves_five_deployments_with_the_typed_configuration(site, deployed):
    with site.client() as client:
        found = names(client)
    assert set(found) == {"full", "extract", "train", "benchmark", "nightly"}
    assert all(deployment.work_pool_name == "eagle3" for deployment in found.values())
    assert found["full"].parameters["stages"] == list(STAGES)
    assert found["full"].parameters["config"]["name"] == "tiny"
    schema = json.dumps(found["full"].parameter_openapi_schema)
    assert "Passes over the training samples." in schema


def test_a_schedule_that_was_enabled_stays_enabled(site, deployed):
    with site.client() as client:
        nightly = names(client)["nightly"]
        (schedule,) = nightly.schedules
        assert (schedule.schedule.cron, schedule.active) == ("0 2 * * *", True)
        client.update_deployment_schedule(nightly.id, schedule.id, active=False)


def test_the_full_deployment_runs_to_a_measured_draft(site, deployed):
    done = site.prefect("deployment", "run", "eagle3/full", "--watch")
    assert done.returncode == EXIT_OK, done.stdout + done.stderr + site.log.read_text()[-4000:]
    record = find_run(deployed.parent / "workspace", "latest").record()
    assert record.state == "completed"
    assert [stage.stage for stage in record.stages] == list(STAGES)
    with site.client() as client:
        assert client.read_flow_run(UUID(record.flow_run_id)).state.is_completed()
        assert wait_for(lambda: set(task_runs(client, record)) == set(STAGES))


def test_a_step_made_to_fail_shows_its_last_lines_in_the_task_log(site, deployed, tmp_path):
    profile = stand_in_profile(tmp_path, {"step": "extract", "kind": "exit"})
    done = run_with(site, profile, "full")
    assert done.returncode != EXIT_OK
    record = find_run(tmp_path / "workspace", "latest").record()
    assert [stage.state for stage in record.stages][:5] == [*["completed"] * 3, "failed", "pending"]
    with site.client() as client:
        assert wait_for(lambda: "extract" in task_runs(client, record))
        failed = task_runs(client, record)["extract"]
        assert wait_for(lambda: "token-before-exit" in log_of(client, failed.id))
        message = client.read_flow_run(UUID(record.flow_run_id)).state.message
    assert "stage extract failed: step extract ended with exit code 1" in message


def test_cancelling_a_deployed_run_ends_its_step(site, deployed, tmp_path):
    profile = stand_in_profile(tmp_path, {"step": "extract", "kind": "hang"})
    done = run_with(site, profile, "extract", watch=False)
    assert done.returncode == EXIT_OK, done.stderr
    log = tmp_path / "workspace" / "runs"
    ready = lambda: any("grandchild-ready" in p.read_text() for p in log.glob("*/logs/extract.log"))  # noqa: E731
    assert wait_for(ready, SECONDS), site.log.read_text()[-4000:]
    record = find_run(tmp_path / "workspace", "latest").record()
    assert len(living_steps(record.owner.pid)) >= 2
    assert site.prefect("flow-run", "cancel", record.flow_run_id).returncode == EXIT_OK
    assert wait_for(lambda: not living_steps(record.owner.pid))
    with site.client() as client:
        assert wait_for(lambda: client.read_flow_run(UUID(record.flow_run_id)).state.is_cancelled())
    states = lambda: [s.state for s in find_run(tmp_path / "workspace", "latest").record().stages]  # noqa: E731
    assert wait_for(lambda: states()[:5] == [*["completed"] * 3, "cancelled", "pending"]), states()


def run_with(site, profile, deployment, watch=True):
    """Run a deployment with another configuration."""
    document = json.dumps(yaml.safe_load(profile.read_text()))
    options = ["--watch"] if watch else []
    return site.prefect(
        "deployment", "run", f"eagle3/{deployment}", "--param", f"config={document}", *options
    )


def task_runs(client, record):
    """Task runs by name; the server shows them some time after they have ended."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    chosen = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(record.flow_run_id)]))
    return {run.name: run for run in client.read_task_runs(flow_run_filter=chosen)}


def log_of(client, task_run_id):
    from prefect.client.schemas.filters import LogFilter, LogFilterTaskRunId

    chosen = LogFilter(task_run_id=LogFilterTaskRunId(any_=[task_run_id]))
    return [entry.message for entry in client.read_logs(chosen, limit=200)]
