"""Whether the configured Prefect API can be used."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx
from prefect.client.base import ServerType
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from eagle3_core.errors import HostError

HTTP_HELP = " - For more information check:"


def require_api() -> None:
    """Ask the configured API for its health, before hours depend on it.

    Raises:
        HostError: it does not answer, or answers as something else.
    """
    try:
        with get_client(sync_client=True) as client:
            problem = client.api_healthcheck()
            if problem is None and client.server_type is not ServerType.CLOUD:
                client.api_version()  # a server's UI answers whatever it is asked, with its page
    except Exception as error:
        problem = error
    if problem is None:
        return
    url = str(PREFECT_API_URL.value())
    is_something_else = isinstance(problem, httpx.HTTPStatusError | ValueError)
    if is_something_else and "api" not in urlsplit(url).path.split("/"):
        raise HostError(
            f"there is no Prefect API at {url}: `/api` is missing at its end",
            remedy=f"set PREFECT_API_URL={url.rstrip('/')}/api",
        ) from problem
    reason = next(iter(str(problem).splitlines()), "").partition(HTTP_HELP)[0] or type(problem).__name__
    raise HostError(
        f"the Prefect API {url} does not answer ({reason})",
        remedy="start it with `prefect server start`, or correct or unset PREFECT_API_URL",
    ) from problem
