"""A run whose process was killed counts as crashed once anybody looks."""

from __future__ import annotations

from uuid import UUID

import pytest

from eagle3_core.host.process_tree import ProcessId
from eagle3_core.host.run_folder import create_run_folder, find_run
from tests.doubles.profile import stand_in_config

pytestmark = pytest.mark.orchestrator
RUN_ID = "20260101-000000-a-0000"


@pytest.fixture
def client(api):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def killed_run(config, client, state):
    """A run with a flow run in a state, of a process that is gone; returns the id of the flow run."""
    from flows.eagle3 import eagle3

    flow_run = client.create_flow_run(eagle3, parameters={"config": {}, "stages": []})
    client.set_flow_run_state(flow_run.id, state, force=True)
    attempt = client.read_flow_run(flow_run.id).run_count
    leave_record(config, str(flow_run.id), attempt)
    return flow_run.id


def leave_record(config, flow_run_id, attempt=None):
    folder = create_run_folder(config, ("report",), RUN_ID, flow_run_id, attempt)
    gone = ProcessId.current().model_copy(update={"start_ticks": 1})
    folder.write(folder.record().model_copy(update={"owner": gone}))


def test_every_command_that_looks_at_runs_tells_prefect_of_a_killed_one(tmp_path, client, eagle3_command):
    from prefect.states import Cancelling, Running

    config = stand_in_config(tmp_path)
    profile, workspace = str(tmp_path / "profile.yaml"), str(tmp_path / "workspace")
    commands = (["runs", "--workspace", workspace], ["doctor", profile], ["deploy", "--profile", profile])
    for command, state in zip(commands, (Running(), Cancelling(), Running()), strict=True):
        flow_run_id = killed_run(config, client, state)
        done = eagle3_command(*command)
        assert done.returncode == 0
        line = f"the earlier run {RUN_ID} had been killed; it counts as crashed now\n"
        assert line in (done.stdout if command[0] == "deploy" else done.stderr)
        assert client.read_flow_run(flow_run_id).state.is_crashed()
        assert find_run(config.workspace_path, RUN_ID).record().ended_at is not None
        assert line not in eagle3_command(*command).stderr


def test_a_state_that_prefect_knows_already_stays(tmp_path, client):
    from prefect.states import Completed, Scheduled

    from flows.recovery import settle_killed_runs

    config = stand_in_config(tmp_path)
    for state in (Completed(), Scheduled()):
        flow_run_id = killed_run(config, client, state)
        assert len(list(settle_killed_runs(config.workspace_path))) == 1
        assert client.read_flow_run(flow_run_id).state.type == state.type


def test_a_flow_run_that_runs_again_is_not_the_one_that_was_killed(tmp_path, client):
    from prefect.states import Crashed, Running

    from flows.recovery import settle_killed_runs

    config = stand_in_config(tmp_path)
    flow_run_id = killed_run(config, client, Running())
    for state in (Crashed(), Running()):
        client.set_flow_run_state(flow_run_id, state, force=True)
    assert len(list(settle_killed_runs(config.workspace_path))) == 1
    assert client.read_flow_run(flow_run_id).state.is_running()


def test_a_run_that_this_api_does_not_know_is_left_for_the_one_that_does(tmp_path, api):
    from flows.recovery import settle_killed_runs

    config = stand_in_config(tmp_path)
    leave_record(config, str(UUID(int=1)))
    assert list(settle_killed_runs(config.workspace_path)) == []
    assert find_run(config.workspace_path, RUN_ID).record().ended_at is None


def test_runs_are_listed_also_where_no_api_can_be_told(tmp_path, eagle3_command):
    config = stand_in_config(tmp_path)
    leave_record(config, str(UUID(int=1)))
    for url, said in (("", ""), ("http://127.0.0.1:9/api", "may still count as running")):
        done = eagle3_command("runs", "--workspace", str(config.workspace_path), PREFECT_API_URL=url)
        assert (done.returncode, done.stdout) == (0, f"{RUN_ID}  crashed\n")
        assert said in done.stderr
        assert done.stderr.count("\n") == bool(said)
    assert find_run(config.workspace_path, RUN_ID).record().ended_at is None
