"""Says of earlier runs whose process was killed that they crashed, in their folders and in the API."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from eagle3_core.errors import HostError
from eagle3_core.host.run_folder import RunFolder, RunRecord, list_runs

MESSAGE = "the run's process was killed; the same command goes on where it ended"


def settle_crashed_runs(workspace: Path) -> list[str]:
    """Mark the runs of a workspace whose process is gone; returns their ids.

    A run folder that cannot be read is none of this run's business and left alone.
    """
    settled = []
    for folder in list_runs(workspace):
        try:
            record = folder.record()
        except HostError:
            continue
        if record.state == "crashed" and record.ended_at is None:
            _settle(folder, record)
            settled.append(record.run_id)
    return settled


def _settle(folder: RunFolder, record: RunRecord) -> None:
    folder.finish("crashed", MESSAGE)
    if record.flow_run_id is None:
        return
    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(UUID(record.flow_run_id)).state
            if state is not None and not state.is_final():
                client.set_flow_run_state(UUID(record.flow_run_id), Crashed(message=MESSAGE), force=True)
        except ObjectNotFound:
            return
