"""A real Prefect server in a home of its own, one for all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle3_core.config import PROJECT_ROOT


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Settings for this process and its children; set before anything imports Prefect."""
    home = tmp_path_factory.mktemp("prefect")
    settings = {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    }
    earlier = {name: os.environ.get(name) for name in (*settings, "PREFECT_API_URL")}
    os.environ.update(settings)
    os.environ.pop("PREFECT_API_URL", None)
    yield home
    for name, value in earlier.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def api(prefect_home: Path) -> Iterator[str]:
    """The API's address, also in PREFECT_API_URL and in Prefect's settings."""
    from flows.embedded_server import EmbeddedServer

    server = EmbeddedServer(prefect_home / "server.log")
    os.environ["PREFECT_API_URL"] = server.api_url
    server.wait()
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.launch import send_what_is_queued

    with temporary_settings({PREFECT_API_URL: server.api_url}):
        yield server.api_url
    send_what_is_queued()
    server.stop()


@pytest.fixture
def eagle3_command(prefect_home: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in a process of its own."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=PROJECT_ROOT,
            env=os.environ | {"COLUMNS": "200"} | environment,
            capture_output=True,
            text=True,
            timeout=550,
        )

    return run
