"""The flow `eagle3`: from a target and its conversations to a measured draft."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled
from pydantic import Field

from eagle3_core.config import STAGES, RunConfig, Stage, parse_stages
from eagle3_core.host.process_tree import end_orphans
from eagle3_core.host.run_folder import RunFolder, create_run_folder, new_run_id
from eagle3_core.report.write import write_report
from eagle3_core.run_space import release_space
from eagle3_core.store.open import open_store
from eagle3_core.store.uses import end_use
from flows.recovery import settle_killed_runs
from tasks.benchmark import benchmark
from tasks.cleanup import cleanup
from tasks.export import export
from tasks.extract import extract
from tasks.plan import plan
from tasks.preflight import preflight
from tasks.prepare import prepare
from tasks.report import report
from tasks.reporting import RunCancelled
from tasks.terminal import terminal
from tasks.train import train
from tasks.verify import verify

TASKS: dict[Stage, Any] = {
    "preflight": preflight,
    "plan": plan,
    "prepare": prepare,
    "extract": extract,
    "verify": verify,
    "train": train,
    "export": export,
    "benchmark": benchmark,
    "cleanup": cleanup,
    "report": report,
}
StageList = Annotated[
    list[Stage], Field(min_length=1, description="Stages to run, in any order; inputs come from the store.")
]


@flow(name="eagle3", flow_run_name="{config.name}", persist_result=False)
def eagle3(config: RunConfig, stages: StageList = list(STAGES)) -> Any:  # noqa: B006
    """Run stages of the pipeline, one after the other; the first failure ends the run.

    What the store already holds, complete and with matching hashes, is reused.
    """
    wanted = parse_stages(stages)
    try:
        with recorded_run(config, wanted) as run:
            outcomes = [
                TASKS[stage].with_options(retries=config.limits.step_retries)(config, run.run_id)
                for stage in wanted
            ]
    except RunCancelled as cancelled:
        return Cancelled(message=str(cancelled))
    return {"run_id": run.run_id, "folder": str(run.path), "stages": outcomes}


@contextlib.contextmanager
def recorded_run(config: RunConfig, stages: tuple[Stage, ...]) -> Iterator[RunFolder]:
    """A run folder that says how the run ended, and has a summary and a report also after a failure."""
    logger = get_run_logger()
    orphans = end_orphans()
    if orphans:
        logger.warning("ended %d processes that a killed run had left: %s", len(orphans), orphans)
    for line in settle_killed_runs(config.workspace_path):
        logger.warning("%s", line)
    flow_run_id = str(flow_run.id)
    run_id = new_run_id(config.name, flow_run_id[:4])
    run = create_run_folder(config, stages, run_id, flow_run_id, flow_run.run_count)
    logger.info("run %s in %s", run.run_id, run.path)
    terminal().run_started(run)
    try:
        yield run
    except Exception as error:
        _end_badly(run, config, "failed", str(error))
        raise
    except BaseException:
        _end_badly(run, config, "cancelled", "interrupted")
        raise
    else:
        run.finish("completed")
    finally:
        release_space(config, run.run_id)
        end_use(open_store(config), run.run_id)


def _end_badly(run: RunFolder, config: RunConfig, state: Any, message: str) -> None:
    """Record the end; where even that fails, the first error is what the user needs."""
    try:
        run.finish(state, message)
        write_report(run.path, open_store(config))
    except Exception as error:
        get_run_logger().warning("no report of this run: %s", error)
