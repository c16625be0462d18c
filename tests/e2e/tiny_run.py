"""A whole run on a tiny random target in the real engine environment."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from eagle3_core.config import PROJECT_ROOT, resolve_path
from eagle3_core.host.engine_environment import engine_environment
from eagle3_core.sections import EngineConfig

KINDS = ("question", "code", "list", "arithmetic")
SUBJECTS = ("the sea", "apples", "rain", "the moon", "a cat", "bread", "music", "winter")


def make_tiny_target(folder: Path) -> Path:
    """Write the target, in the engine environment."""
    engine = EngineConfig()
    subprocess.run(
        [str(resolve_path(engine.python)), "-m", "tests.tiny", str(folder)],
        check=True,
        cwd=PROJECT_ROOT,
        env=engine_environment(engine),
        stdin=subprocess.DEVNULL,
    )
    return folder


def tiny_profile(folder: Path, target: Path, name: str = "profile", **changes: dict[str, Any]) -> Path:
    """A profile `name` in `folder`, whose workspace all profiles there share; `changes` by section."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows()))
    document: dict[str, Any] = {
        "name": "tiny",
        "target": {"model": str(target), "dtype": "float32"},
        "data": {
            "prompts": [str(prompts)],
            "heldout_fraction": 0.25,
            "max_length": 128,
            "generation": {"max_tokens": 24},
        },
        "draft": {"vocab_size": 256},
        "capture": {"shard_bytes": 262144},
        "train": {"num_epochs": 2, "pack_tokens": 256, "learning_rate": 1e-3, "compute_dtype": "float32"},
        "benchmark": {"num_prompts": 6, "max_tokens": 16, "concurrency": 6, "measure_speed": False},
        "engine": {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_gib": 1},
        "limits": {"min_free_memory_gib": 1, "min_free_disk_gib": 0, "step_retries": 0},
        "workspace": str(folder / "workspace"),
    }
    for section, values in changes.items():
        document[section] = document[section] | values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def prompt_rows() -> list[dict[str, Any]]:
    """Thirty-two short prompts of four kinds."""
    return [
        {
            "id": f"{kind}-{index}",
            "kind": kind,
            "messages": [{"role": "user", "content": f"Tell me something about {subject} ({kind})."}],
        }
        for index, subject in enumerate(SUBJECTS)
        for kind in KINDS
    ]
