"""Two ways to an SGLang engine: in this process (`sglang.Engine`), or its HTTP server as a child.

Both take `ServerArgs` by name and requests by id, and answer with the request's `meta_info`. Requests run in
an event loop of their own thread, so that a signal which SGLang raises when one of its processes dies finds
our handler, not the one that kills this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from eagle3_core.capture.job import EngineEndedError
from eagle3_core.config import PROJECT_ROOT
from eagle3_core.errors import CaptureError
from eagle3_core.host.inspect import LOOPBACK, refuse_taken_port

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
REPORT_SECONDS = 15.0
END_SECONDS = 10.0
TAIL_LINES = 20
NEW_TOKENS = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}

_child_failed = threading.Event()


def note_failed_child(signum: int, frame: Any) -> None:
    """SGLang's signal that one of its processes has died."""
    _child_failed.set()


class Transport(ABC):
    """A loaded engine."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-requests", daemon=True)
        self._thread.start()

    def send(self, rid: str, token_ids: Sequence[int]) -> Future[dict[str, Any]]:
        """Send a prompt; the future gives the reply's `meta_info`, or raises."""
        return asyncio.run_coroutine_threadsafe(self._generate(rid, list(token_ids)), self._loop)

    @abstractmethod
    async def _generate(self, rid: str, token_ids: list[int]) -> dict[str, Any]: ...

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The running engine's server arguments."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise `EngineEndedError` when a process of the engine has ended."""

    def close(self) -> None:
        """End the engine with all of its processes."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(END_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_SECONDS)


class InProcess(Transport):
    """`sglang.Engine`; its scheduler is a process of its own all the same."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        _child_failed.clear()
        self._engine = sglang.Engine(**arguments, custom_sigquit_handler=note_failed_child)
        super().__init__()

    async def _generate(self, rid: str, token_ids: list[int]) -> dict[str, Any]:
        reply = await self._engine.async_generate(input_ids=token_ids, rid=rid, sampling_params=NEW_TOKENS)
        return reply["meta_info"]

    def settings(self) -> dict[str, Any]:
        return vars(self._engine.server_args)

    def check_alive(self) -> None:
        if _child_failed.is_set():
            raise EngineEndedError(
                "a process of the SGLang engine ended", remedy="the first error in the log says why"
            )

    def close(self) -> None:
        super().close()
        self._engine.shutdown()


class HttpServer(Transport):
    """`python -m sglang.launch_server` in a process group of its own, on a port of this host.

    Args:
        arguments: `ServerArgs` by name.
        port: where it listens; must be free.
        timeout_seconds: a server that is not ready by then is ended.

    Raises:
        HostError: something listens there already.
        CaptureError: the server did not come up, or another one answers.
    """

    def __init__(self, arguments: dict[str, Any], port: int, timeout_seconds: float) -> None:
        refuse_taken_port(port)
        self._url = f"http://{LOOPBACK}:{port}"
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        command = [sys.executable, "-m", "sglang.launch_server"]
        self._process = subprocess.Popen(
            [*command, *command_line(arguments | {"host": LOOPBACK, "port": port})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=PROJECT_ROOT,
            start_new_session=True,
        )
        threading.Thread(target=self._read, name="sglang-log", daemon=True).start()
        try:
            self._wait(time.monotonic(), timeout_seconds)
            self._refuse_stranger(arguments)
        except BaseException:
            self._end()
            raise
        super().__init__()
        self._session: Any = None

    async def _generate(self, rid: str, token_ids: list[int]) -> dict[str, Any]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        request = {"input_ids": token_ids, "rid": rid, "sampling_params": NEW_TOKENS}
        try:
            async with self._session.post(f"{self._url}/generate", json=request) as response:
                reply = await response.json()
        except aiohttp.ClientError as error:
            raise EngineEndedError(
                f"the SGLang server does not answer any more ({type(error).__name__}); {self._last_line()}"
            ) from error
        if response.status != 200:
            raise CaptureError(f"SGLang answered {response.status}: {json.dumps(reply)[:500]}")
        return reply["meta_info"]

    @property
    def pid(self) -> int:
        """The server's process, which leads its group."""
        return self._process.pid

    def settings(self) -> dict[str, Any]:
        return self._get("/server_info")

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            raise EngineEndedError(
                f"the SGLang server ended with exit code {self._process.returncode}; {self._last_line()}"
            )

    def close(self) -> None:
        if self._session is not None:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(END_SECONDS)
        super().close()
        self._end()

    def _wait(self, started: float, timeout_seconds: float) -> None:
        reported = started
        while True:
            if self._process.poll() is not None:
                raise CaptureError(
                    f"the SGLang server ended with exit code {self._process.returncode} while it loaded; "
                    f"{self._last_line()}",
                    remedy="the first error in the log says why",
                )
            with contextlib.suppress(OSError, ValueError):
                self._get("/health")
                return
            now = time.monotonic()
            if now - started > timeout_seconds:
                raise CaptureError(f"the SGLang server was not ready after {timeout_seconds:.0f} s")
            if now - reported > REPORT_SECONDS:
                reported = now
                logger.info("waiting for SGLang for %.0f s; %s", now - started, self._last_line())
            time.sleep(POLL_SECONDS)

    def _refuse_stranger(self, arguments: dict[str, Any]) -> None:
        found = self.settings()
        if any(found.get(name) != arguments[name] for name in ("model_path", "forward_hooks")):
            raise CaptureError(
                f"{self._url} answers for another server, with {found.get('model_path')}",
                expected=f"the server that was started for {arguments['model_path']}",
                remedy="set capture.sglang_port to a free port",
            )

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}{path}", timeout=30) as response:
            return json.loads(response.read() or "null")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").strip()
            if line:
                self._tail.append(line)
                logger.info("sglang: %s", line)

    def _last_line(self) -> str:
        return f"its last line: {self._tail[-1]}" if self._tail else "it said nothing"

    def _end(self) -> None:
        """End the server's whole group; what was captured is on disk or not wanted."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


async def _cancel_others() -> None:
    """End whatever else runs in this event loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def command_line(arguments: dict[str, Any]) -> list[str]:
    """`ServerArgs` by name as options of `sglang.launch_server`; what is false or None is left out."""
    options = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            options.append(option)
        elif isinstance(value, list | dict):
            options += [option, json.dumps(value)]
        elif value is not None and value is not False:
            options += [option, str(value)]
    return options
