"""Says of runs whose process was killed that they crashed, in the Prefect API and in their folders.

A killed process tells nobody, and Prefect goes on counting its run as running: in a work pool with a limit it
keeps its slot, so that no run may start that could say so. Commands that look at a workspace do it too.

Prefect is imported when there is something to tell it: where no run was killed, they answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from eagle3_core.errors import HostError
from eagle3_core.host.run_folder import RunRecord, killed_runs

MESSAGE = "the run's process was killed; the same command goes on where it ended"
REQUEST_SECONDS = 10.0


def settle_killed_runs(workspace: Path) -> Iterator[str]:
    """Mark the runs of a workspace whose process is gone; yields a line for each.

    The API first: a folder that says how its run ended is not looked at again. So a run that this API does
    not know stays as it is, for whoever uses the API that does.
    """
    import httpx
    from prefect.exceptions import PrefectException

    for folder, record in killed_runs(workspace):
        try:
            if record.flow_run_id is None or _tell_prefect(UUID(record.flow_run_id), record):
                folder.finish("crashed", MESSAGE)
                yield f"the earlier run {record.run_id} had been killed; it counts as crashed now"
        except (HostError, httpx.HTTPError, PrefectException, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            yield f"the earlier run {record.run_id} had been killed and may still count as running ({reason})"
            return


def settle_before_looking(workspace: Path) -> None:
    """The same from outside a run, if an API is configured; says on standard error what it did."""
    if not killed_runs(workspace):
        return
    from flows.launch import quiet_prefect

    quiet_prefect(debug=False)
    from prefect.settings import (
        PREFECT_API_REQUEST_TIMEOUT,
        PREFECT_API_URL,
        PREFECT_CLIENT_MAX_RETRIES,
        temporary_settings,
    )

    if not PREFECT_API_URL.value():
        return
    # Who only looks does not wait for minutes until an API answers.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: REQUEST_SECONDS}):
        for line in settle_killed_runs(workspace):
            print(f"eagle3: {line}", file=sys.stderr)


def _tell_prefect(flow_run_id: UUID, record: RunRecord) -> bool:
    """Let a flow run that counts as running count as crashed; False if the API does not know it.

    One that Prefect runs again under the same id is not the one that was killed.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    with get_client(sync_client=True) as client:
        try:
            flow_run = client.read_flow_run(flow_run_id)
            state, is_same = flow_run.state, record.flow_run_attempt in (None, flow_run.run_count)
            if is_same and state is not None and (state.is_running() or state.is_cancelling()):
                client.set_flow_run_state(flow_run_id, Crashed(message=MESSAGE), force=True)
        except ObjectNotFound:
            return False
    return True
