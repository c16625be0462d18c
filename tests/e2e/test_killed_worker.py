"""A worker and its run are killed with SIGKILL, in a pool where one run may be at a time."""

from __future__ import annotations

from uuid import UUID

import psutil
import pytest

from eagle3_core.errors import EXIT_OK
from eagle3_core.host.run_folder import find_run
from tests.doubles.profile import stand_in_profile
from tests.e2e.test_deployment import SECONDS, Site, deploy, run_with
from tests.host.test_process import living_steps, wait_for

pytestmark = [pytest.mark.orchestrator, pytest.mark.slow]


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path)
    with site.background(*site.server_command), site.client() as client:
        assert wait_for(lambda: client.api_healthcheck() is None, SECONDS), site.log.read_text()
        yield site


def hangs(workspace):
    return any("grandchild-ready" in log.read_text() for log in workspace.glob("runs/*/logs/extract.log"))


def kill_with_children(process):
    processes = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in processes:
        one.suspend()
    for one in processes:
        one.kill()
    process.wait()


def test_looking_at_the_runs_gives_the_slot_of_a_killed_one_to_the_next(site, tmp_path):
    workspace = tmp_path / "workspace"
    profile = stand_in_profile(tmp_path, {"step": "extract", "kind": "hang"})
    deploy(site, profile)
    assert site.prefect("work-pool", "set-concurrency-limit", "eagle3", "1").returncode == EXIT_OK
    with site.background("worker", "start", "--pool", "eagle3") as worker:
        assert run_with(site, profile, "extract", watch=False).returncode == EXIT_OK
        assert wait_for(lambda: hangs(workspace), SECONDS), site.log.read_text()[-4000:]
        killed = find_run(workspace, "latest").record()
        kill_with_children(worker)
    assert wait_for(lambda: not living_steps(killed.owner.pid))
    with site.client() as client, site.background("worker", "start", "--pool", "eagle3"):
        state = client.read_flow_run(UUID(killed.flow_run_id)).state
        assert state.is_running(), "nobody has told the API yet"
        done = site.eagle3("runs", "--workspace", str(workspace))
        assert f"{killed.run_id}  crashed" in done.stdout
        assert client.read_flow_run(UUID(killed.flow_run_id)).state.is_crashed()
        assert run_with(site, stand_in_profile(tmp_path), "extract").returncode == EXIT_OK
    assert find_run(workspace, "latest").record().state == "completed"
