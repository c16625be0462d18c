"""Registers the deployments of `deployments/prefect.yaml` with the configured Prefect API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.utilities.callables import parameter_schema

from eagle3_core.config import PROJECT_ROOT, RunConfig
from eagle3_core.errors import HostError
from flows.api import require_api
from flows.eagle3 import eagle3
from flows.recovery import settle_killed_runs

WORK_POOL = "eagle3"
DEFINITIONS = PROJECT_ROOT / "deployments" / "prefect.yaml"


def deploy_all(config: RunConfig) -> Iterator[str]:
    """Make the work pool if it is missing and register every deployment; yields a line for each.

    Registering again replaces a deployment in place; a schedule that was enabled stays enabled.

    Raises:
        HostError: no API is configured, or it does not answer.
    """
    if not PREFECT_API_URL.value():
        raise HostError(
            "no Prefect API is configured",
            remedy="start one with `prefect server start` and set PREFECT_API_URL=http://127.0.0.1:4200/api",
        )
    require_api()
    yield from settle_killed_runs(config.workspace_path)
    with get_client(sync_client=True) as client:
        yield _ensure_work_pool(client)
        flow_id = client.create_flow(eagle3)
        for definition in definitions():
            _register(client, flow_id, definition, config)
            yield f"deployment eagle3/{definition['name']}: {definition['description']}"
    yield f"start a worker with `prefect worker start --pool {WORK_POOL}`"


def definitions() -> list[dict[str, Any]]:
    """The deployments as the file defines them."""
    return yaml.safe_load(DEFINITIONS.read_text())["deployments"]


def _ensure_work_pool(client: SyncPrefectClient) -> str:
    try:
        client.read_work_pool(WORK_POOL)
        return f"work pool {WORK_POOL} is there"
    except ObjectNotFound:
        with contextlib.suppress(ObjectAlreadyExists):  # a worker that starts now makes it too
            client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
        return f"work pool {WORK_POOL} made"


def _register(client: SyncPrefectClient, flow_id: Any, definition: dict[str, Any], config: RunConfig) -> None:
    client.create_deployment(
        flow_id=flow_id,
        name=definition["name"],
        description=definition["description"],
        entrypoint=definition["entrypoint"],
        work_pool_name=definition["work_pool"]["name"],
        parameters={"config": config.model_dump(mode="json"), **definition["parameters"]},
        parameter_openapi_schema=parameter_schema(eagle3).model_dump_for_openapi(),
        enforce_parameter_schema=True,
        schedules=_schedules(client, definition),
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(PROJECT_ROOT)}}],
        job_variables={"working_dir": str(PROJECT_ROOT), "env": {"PYTHONPATH": str(PROJECT_ROOT)}},
        tags=["eagle3"],
    )


def _schedules(client: SyncPrefectClient, definition: dict[str, Any]) -> list[DeploymentScheduleCreate]:
    existing = _existing_schedules(client, definition["name"])
    wanted = []
    for entry in definition.get("schedules", []):
        schedule = CronSchedule(cron=entry["cron"], timezone=entry["timezone"])
        enabled = any(
            old.active and isinstance(old.schedule, CronSchedule) and old.schedule.cron == entry["cron"]
            for old in existing
        )
        wanted.append(DeploymentScheduleCreate(schedule=schedule, active=enabled or entry["active"]))
    return wanted


def _existing_schedules(client: SyncPrefectClient, name: str) -> list[DeploymentSchedule]:
    try:
        return client.read_deployment_by_name(f"eagle3/{name}").schedules
    except ObjectNotFound:
        return []
