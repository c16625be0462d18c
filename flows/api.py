"""Whether the configured Prefect API can be used."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from eagle3_core.errors import HostError


def require_api() -> None:
    """Ask the configured API for its health, before hours depend on it.

    Raises:
        HostError: it does not answer, or answers as something else.
    """
    try:
        with get_client(sync_client=True) as client:
            problem = client.api_healthcheck()
    except Exception as error:
        problem = error
    if problem is not None:
        reason = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise HostError(
            f"the Prefect API {PREFECT_API_URL.value()} does not answer ({reason})",
            remedy="start it with `prefect server start`, or correct or unset PREFECT_API_URL",
        ) from problem
