"""What the command line prints about host, targets and configuration fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from eagle3_core.config import RunConfig, parse_config
from eagle3_core.contracts import FetchTargetResult, ProgressEvent
from eagle3_core.errors import EXIT_OK, EXIT_USER_ERROR
from eagle3_core.host.process import run_step
from eagle3_core.preflight import Check, run_checks
from eagle3_core.probing import CHECK_NAME, remembered_check
from eagle3_core.sections import EngineConfig, Section, TargetConfig
from eagle3_core.target.locate import fetch_spec
from flows.field_types import type_in_words
from flows.recovery import settle_before_looking


def show_checks(config: RunConfig, as_json: bool) -> int:
    """Print every check of a profile; returns the exit code. Runs that were killed are told to Prefect."""
    settle_before_looking(config.workspace_path)
    checks, error = run_checks(config)
    checks.append(Check(name=CHECK_NAME, ok=True, found=remembered_check(config)))
    if as_json:
        print(json.dumps([check.model_dump() for check in checks], indent=1))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for check in checks:
            mark = "[green]ok[/]" if check.ok else "[red]bad[/]"
            table.add_row(mark, check.name, escape(check.found))
        Console().print(table)
    return EXIT_OK if error is None else EXIT_USER_ERROR


def show_fields(as_json: bool) -> None:
    """Print every field of the configuration, generated from the models."""
    if as_json:
        print(json.dumps(RunConfig.model_json_schema(), indent=1))
        return
    console = Console(highlight=False)
    for name, kind, default, meaning in fields(RunConfig):
        console.print(f"[bold]{name}[/]  {escape(kind)}, {escape(default)}")
        console.print(Padding(escape(meaning), (0, 0, 0, 4)))


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of every leaf field, sections opened."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from fields(annotation, f"{prefix}{name}.")
            continue
        default = "required" if info.default is PydanticUndefined else f"default {_text(info.default)}"
        meaning = re.sub(r"\bNone\b", "null", info.description or "")  # as YAML writes it
        yield prefix + name, type_in_words(annotation), default, meaning


def fetch_target(name: str, workspace: str, engine_python: str | None) -> None:
    """Fetch a built-in target; prints its folder."""
    config = target_config(name, workspace)
    spec = fetch_spec(config)
    engine = EngineConfig(python=engine_python) if engine_python else config.engine
    console = Console(stderr=True)

    def on_progress(event: ProgressEvent) -> None:
        console.print(f"{event.done:g}/{event.total:g} {event.unit} {event.message}", highlight=False)

    folder = config.workspace_path / "cache" / "logs"
    result: FetchTargetResult = run_step(
        "fetch_target", spec, engine=engine, folder=folder, on_progress=on_progress
    )
    print(result.path)


def target_config(name: str, workspace: str, revision: str | None = None) -> RunConfig:
    """The configuration of a run of which only the target is known."""
    target = TargetConfig(model=name, revision=revision).model_dump()
    return parse_config({"name": "target", "target": target, "workspace": workspace})


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
