"""Rough minutes of each stage.

The rates were measured with a target of 135 million parameters on two CPU cores and on one H200, and are
scaled by the size of the target and the number of cores. They tell minutes from hours, no more.
"""

from __future__ import annotations

from eagle3_core.config import RunConfig, Stage
from eagle3_core.estimate.workload import Workload
from eagle3_core.host.inspect import inspect_host
from eagle3_core.target.info import TargetInfo

RATES: dict[str, dict[str, float]] = {
    "cpu": {"generate": 860, "generate_one": 50, "capture": 2200, "train": 1500, "load_seconds": 15},
    "cuda": {"generate": 18000, "generate_one": 250, "capture": 100000, "train": 30000, "load_seconds": 60},
}
"""Tokens per second by device."""
REFERENCE_WEIGHT_BYTES = 270_000_000
REFERENCE_CORES = 2


def stage_minutes(config: RunConfig, target: TargetInfo, load: Workload) -> dict[Stage, float]:
    """Rough minutes of each stage that makes something."""
    device = config.engine.device
    rates = RATES[device]
    slowness = max(0.25, target.weights_bytes / REFERENCE_WEIGHT_BYTES)
    if device == "cpu":
        slowness *= REFERENCE_CORES / max(1, inspect_host().num_cpus)
    else:
        slowness /= config.engine.tensor_parallel_size
    bench = load.num_benchmark_prompts(config.benchmark.num_prompts) * config.benchmark.max_tokens
    one_at_a_time = 2 * bench / rates["generate_one"] if config.benchmark.measure_speed else 0.0
    work: dict[Stage, float] = {
        "prepare": load.num_answer_tokens / rates["generate"],
        "extract": load.num_tokens / rates["capture"],
        "verify": load.num_tokens / rates["capture"] / 2,
        "train": config.train.num_epochs * load.num_tokens / rates["train"] * config.train.ttt_steps / 3,
        "export": 0.0,
        "benchmark": 2 * bench / rates["generate"] + one_at_a_time,
    }
    return {stage: (seconds * slowness + rates["load_seconds"]) / 60 for stage, seconds in work.items()}
