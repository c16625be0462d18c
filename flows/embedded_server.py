"""Prefect's own API server in a process of its own, for runs without a configured API.

It is the server that Prefect would start by itself, with two differences: it starts while this process
still checks and imports, and it ends with this process however that ends, because it watches its standard
input. Runs are kept in the SQLite database of PREFECT_HOME, where a later `prefect server start` shows them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import HostError

START_SECONDS = 180.0
SHUTDOWN_SECONDS = 4.0
SERVER_VARIABLES = {
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_UI_ENABLED": "0",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}


class EmbeddedServer:
    """Starts at once; `wait` returns when it answers."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # The server gets the socket, not a number: until it listens, another process could take the port.
        with socket.socket() as listener, log_path.open("wb") as log:
            listener.bind(("127.0.0.1", 0))
            self._port = listener.getsockname()[1]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.embedded_server", str(listener.fileno())],
                pass_fds=(listener.fileno(),),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | SERVER_VARIABLES,
                cwd=PROJECT_ROOT,  # a folder `flows` where the user works must not be taken for ours
                start_new_session=True,
            )

    @property
    def api_url(self) -> str:
        """For PREFECT_API_URL."""
        return f"http://127.0.0.1:{self._port}/api"

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Return when the server answers.

        Raises:
            HostError: it ended, or did not answer in time; names its log.
        """
        deadline = time.monotonic() + seconds
        while not self._answers():
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                self.stop()
                what = (
                    f"ended with exit code {status}" if status is not None else f"is silent for {seconds:g} s"
                )
                raise HostError(
                    f"Prefect's embedded server {what}",
                    remedy=f"see {self._log_path}, or start `prefect server start` and set PREFECT_API_URL",
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5.0)
            return
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.api_url}/health", timeout=2.0) as response:
                return response.status == 200
        except (OSError, urllib.error.URLError):
            return False


def serve(descriptor: int) -> None:
    """Serve the API on a bound socket until standard input closes or SIGTERM comes."""
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app

    server = uvicorn.Server(uvicorn.Config(create_app, factory=True, log_level="error"))
    with socket.socket(fileno=descriptor) as listener:
        server.run(sockets=[listener])
    if not server.started:
        sys.exit("the server did not start")


def _end_with_parent() -> None:
    while os.read(0, 4096):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SHUTDOWN_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
