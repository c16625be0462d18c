"""A profile over the stand-in engine and target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from eagle3_core.config import RunConfig, parse_config
from tests.doubles.engine import make_engine
from tests.doubles.steps import FAULT
from tests.doubles.target import make_target


def stand_in_profile(folder: Path, fault: dict[str, str] | None = None, **changes: Any) -> Path:
    """Write target, engine and profile below `folder`; returns the profile's path."""
    prompts = folder / "prompts.jsonl"
    rows = [
        {
            "id": f"p{index}",
            "kind": "question",
            "messages": [{"role": "user", "content": f"What is {index}?"}],
        }
        for index in range(8)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {FAULT: json.dumps(fault)} if fault else {}
    document: dict[str, Any] = {
        "name": "stand-in",
        "target": {"model": str(make_target(folder / "target"))},
        "data": {"prompts": [str(prompts)], "max_length": 256, "generation": {"max_tokens": 16}},
        "benchmark": {"num_prompts": 4, "max_tokens": 16},
        "engine": {"python": str(make_engine(folder)), "max_model_len": 256, "environment": environment},
        "limits": {"min_free_memory_gib": 0, "min_free_disk_gib": 0, "step_retries": 0},
        "workspace": str(folder / "workspace"),
    }
    for key, value in changes.items():
        section = document.get(key)
        document[key] = section | value if isinstance(section, dict) else value
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def stand_in_config(folder: Path, fault: dict[str, str] | None = None, **changes: Any) -> RunConfig:
    """The same as a validated configuration."""
    return parse_config(yaml.safe_load(stand_in_profile(folder, fault, **changes).read_text()))
