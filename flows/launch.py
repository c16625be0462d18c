"""Runs the flow in this process, for the command line.

Prefect reads its settings when it is imported, so nothing here imports it at the top.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from eagle3_core.config import STAGES, RunConfig, Stage
from eagle3_core.errors import EXIT_INTERRUPTED, EXIT_OK, Eagle3Error, HostError
from eagle3_core.host.run_folder import RunFolder
from eagle3_core.planning import inputs_from_the_store, plan_run
from eagle3_core.preflight import run_checks
from eagle3_core.target.locate import target_folder
from flows.embedded_server import EmbeddedServer

DRAIN_SECONDS = 60.0
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
}


def quiet_prefect(debug: bool) -> None:
    """Set Prefect's settings for a run from the command line; what the user has set stays."""
    console_level = {} if debug else {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
    for name, value in (QUIET | console_level).items():
        os.environ.setdefault(name, value)


def launch(config: RunConfig, stages: Sequence[Stage] | None, debug: bool) -> int:
    """Check, run the flow, say where its report is. Returns the exit code.

    Raises:
        Eagle3Error: a check or a stage failed.
    """
    quiet_prefect(debug)
    server = start_server(config)
    try:
        _, error = run_checks(config, stages or STAGES)
        if error is not None:
            raise error
        _check_inputs(config, stages or STAGES)
        if server is None:
            from flows.api import require_api

            require_api()
        return _run_flow(config, list(stages or STAGES), server)
    finally:
        if server is not None:
            server.stop()


def _check_inputs(config: RunConfig, stages: Sequence[Stage]) -> None:
    """Refuse stages whose inputs are not there, before a run is made of them.

    Raises:
        MissingInputError: names the stage that makes what is missing.
    """
    if inputs_from_the_store(stages) and target_folder(config).is_dir():  # else the preflight fetches it
        plan_run(config).check_inputs(stages)


def start_server(config: RunConfig) -> EmbeddedServer | None:
    """An embedded server unless an API is configured; sets PREFECT_API_URL.

    Raises:
        HostError: the workspace cannot be written.
    """
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return None
    try:
        server = EmbeddedServer(config.workspace_path / "cache" / "prefect-server.log")
    except OSError as error:
        raise HostError(
            f"cannot write to {config.workspace_path} ({error.strerror or error})",
            remedy="set `workspace` to a folder that can be written",
        ) from error
    os.environ["PREFECT_API_URL"] = server.api_url
    return server


def _run_flow(config: RunConfig, stages: list[Stage], server: EmbeddedServer | None) -> int:
    from prefect.exceptions import CancelledRun
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.eagle3 import eagle3
    from tasks.terminal import RichTerminal, use_terminal

    if server is not None:
        server.wait()
    console = Console(stderr=False)
    terminal = RichTerminal(console, has_own_server=server is not None)
    use_terminal(terminal)
    settings: dict[Any, Any] = {PREFECT_API_URL: server.api_url} if server else {}
    try:
        with temporary_settings(updates=settings):
            run: Any = eagle3(config=config, stages=stages)
    except (KeyboardInterrupt, CancelledRun) as ended:
        terminal.close()
        how = "cancelled" if isinstance(ended, CancelledRun) else "interrupted"
        print(f"eagle3: {how}; the same command goes on where this ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception:
        terminal.close()
        if terminal.run is not None:
            _say_where_to_look(console, terminal.run)
        raise
    finally:
        terminal.close()
        send_what_is_queued()
    _say_result(console, RunFolder(config.workspace_path / "runs" / run["run_id"]))
    return EXIT_OK


def send_what_is_queued() -> None:
    """Prefect sends logs and the events that make task runs visible from threads of its own."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=DRAIN_SECONDS)


def _say_where_to_look(console: Console, run: RunFolder) -> None:
    """Before the error: the log of the stage that failed, and the report."""
    from flows.views import failure_lines

    with contextlib.suppress(Eagle3Error):  # the run's own error is what the user needs
        for line in failure_lines(run):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _say_result(console: Console, run: RunFolder) -> None:
    from flows.views import summary_lines

    for line in summary_lines(run):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
