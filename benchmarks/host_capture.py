"""A part of the host benchmark: capture beside plain prefill, with an engine on each GPU and one on all.

Two targets: an 8B shape with made-up weights, and a miniature of DeepSeek-V3 (latent attention, experts). Of
each, an engine captures on every GPU (replicas) and one on all together (tensor parallel); one engine of each
way does plain prefill. A round of all replicas has an equal number of prompts for each and ends when the
slowest has stored its last shard.

On GPUs all engines load at once: processes are forks of one that has imported vLLM, and a given size of the
KV cache spares vLLM from measuring memory that others change meanwhile. Then the groups take turns, when
nothing else works on the GPUs. On the CPU, whose memory and cores they share, one group after the other is
loaded, measured and ended.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil

from benchmarks.capture import find_target, parse
from benchmarks.capture_process import Process, start_process
from benchmarks.engine_forks import ForkedWorker, begin_import
from benchmarks.host_engines import Engines, Group, Start, num_rounds, summary
from benchmarks.host_parts import PartSpec, serve, tell
from benchmarks.host_signals import QUIET_SECONDS, wait_for
from eagle3_core.config import EngineConfig
from eagle3_core.errors import CaptureError
from eagle3_core.host.engine_environment import engine_environment
from eagle3_core.target.info import inspect_target

SIZES = {
    ("capture", "8b"): ("llama-8b", 2048, 96),
    ("capture", "tiny"): ("tiny", 256, 24),
    ("mla", "8b"): ("deepseek-v3", 1024, 1024),
    ("mla", "tiny"): ("deepseek-v3", 128, 16),
}
"""Target, tokens of a prompt and prompts of an engine in a round, by part of the table and shape."""
GPU_KV_CACHE_GIB = {"capture": 8.0, "mla": 2.0}
"""Room for many steps of an engine; up to eight engines share a GPU."""
CPU_KV_CACHE_GIB = 1.0
GPU_SHARE = 0.1
"""Of a GPU's memory: so much has to be free when an engine starts. Its KV cache has a size of its own."""
STATES = 4
FOLDER_SHARE = 0.8
"""Of the free space, for the shards of a round."""
LOAD_SHARE = 0.62
"""Of the part's time: engines of a wave that take longer are given up, and the others are measured."""
ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""A process that has imported vLLM and computed nothing can be forked: its engine need not import again."""
LEAST_SECONDS = 30.0
"""Engines need so much time at least, or loading them is not tried again."""


def measure(spec: PartSpec) -> None:
    """Measure all groups; what one has found is left at once, and none is lost with another.

    Raises:
        CaptureError: groups failed; names each.
    """
    folder = Path(spec.folder)
    found: dict[str, Any] = {"seconds": {}}
    started = time.perf_counter()
    engine = EngineConfig(device=spec.device, python=sys.executable, kv_cache_gib=CPU_KV_CACHE_GIB)
    begin_import(engine_environment(engine) | ENVIRONMENT)
    groups = plan_groups(spec, find_targets(spec, folder), psutil.disk_usage(spec.folder).free)
    for group in groups:
        found.setdefault(group.part, _prompts(spec, group))
        if spec.gpus == 1:
            found[group.part]["tensor_parallel"] = {"skipped": "one GPU: the same as one replica"}
    found["seconds"]["targets"] = time.perf_counter() - started
    spec.save(found)
    failed: dict[str, str] = {}
    waves = [groups] if spec.device == "cuda" else [[group] for group in groups]
    for wave in waves:
        failed |= measure_wave(spec, wave, found, (ForkedWorker, start_alone), LOAD_SHARE * spec.seconds)
    if failed:
        raise CaptureError("; ".join(f"{title}: {reason}" for title, reason in failed.items()))


def plan_groups(spec: PartSpec, targets: dict[str, Path], free_bytes: int) -> list[Group]:
    """The groups in the order in which they are measured.

    Args:
        spec: of the part.
        targets: folder of each part's target.
        free_bytes: where shards are stored.
    """
    ways = [("replicas", 1, spec.gpus)] + ([("tensor_parallel", spec.gpus, 1)] if spec.gpus > 1 else [])
    num_storing = sum(count for _, _, count in ways)
    groups = []
    for part, target in targets.items():
        _, num_tokens, most = SIZES[part, spec.shape]
        stored = num_tokens * STATES * 2 * inspect_target(target).hidden_size
        num_prompts = max(1, min(most, int(FOLDER_SHARE * free_bytes / (num_storing * stored))))
        for name, size, count in ways:
            options = _options(spec, part, target, num_prompts, size, num_rounds(count))
            groups.append(Group(part, name, options, count))
    return groups


def _options(spec: PartSpec, part: str, target: Path, num_prompts: int, size: int, repeats: int) -> Namespace:
    """Options of the capture benchmark for engines on so many GPUs each."""
    values = {
        "--device": spec.device,
        "--shape": target,
        "--prompt-tokens": SIZES[part, spec.shape][1],
        "--num-prompts": num_prompts,
        "--repeats": repeats,
        "--tensor-parallel": size,
        "--gpu-share": GPU_SHARE,
        "--gpu-kv-cache-gib": GPU_KV_CACHE_GIB[part],
    }
    flags = ["--eager"] if part == "mla" else ["--eager", "--dummy"]
    return parse([str(word) for pair in values.items() for word in pair] + flags)


def find_targets(spec: PartSpec, folder: Path) -> dict[str, Path]:
    """Write both targets; the miniature's heads can be shared by all GPUs."""
    from eagle3_core.capture import miniature
    from eagle3_core.capture.miniature_config import miniature_config
    from eagle3_core.capture.probe_plan import known_architecture

    shape = parse(["--shape", SIZES["capture", spec.shape][0], "--dummy"])
    small = miniature_config(known_architecture(SIZES["mla", spec.shape][0]), spec.gpus)
    return {
        "capture": find_target(shape, folder),
        "mla": miniature.make_miniature(small, folder / "miniature").folder,
    }


def _prompts(spec: PartSpec, group: Group) -> dict[str, Any]:
    options = group.options
    return {
        "target": SIZES[group.part, spec.shape][0],
        "prompt_tokens": options.prompt_tokens,
        "num_prompts": options.num_prompts,
    }


def start_alone(spec: Path, mode: str, variables: Mapping[str, str]) -> Process:
    """Start a worker that imports vLLM for itself."""
    return start_process(spec, mode, os.environ | variables)


def measure_wave(
    spec: PartSpec, wave: Sequence[Group], found: dict[str, Any], starts: Sequence[Start], seconds: float
) -> dict[str, str]:
    """Load groups at once, then measure one after the other, and end their processes.

    A group that does not load is tried again by the next way to start processes: a GPU's driver may not stand
    forks, and engines that start at once can get into each other's way.

    Args:
        spec: of the part.
        wave: the groups.
        found: gets what is measured, and why groups did not load; saved whenever something is known.
        starts: ways to start a process.
        seconds: for loading, over all ways.

    Returns:
        Why groups failed, by title.
    """
    began = time.perf_counter()
    loaded: dict[str, tuple[Engines, dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    try:
        for start in starts:
            waiting = [group for group in wave if group.title not in loaded]
            left = seconds - (time.perf_counter() - began)
            if not waiting or (failed and left < LEAST_SECONDS):
                break
            now_loaded, failed = start_groups(spec, waiting, start, left)
            loaded |= {engines.group.title: (engines, facts) for engines, facts in now_loaded.items()}
            if failed:
                found["failed"] = found.get("failed", {}) | failed
        found["seconds"].setdefault("until_loaded", time.perf_counter() - began)
        ready = [loaded[group.title] for group in wave if group.title in loaded]
        for group in wave:
            if group.title in failed:
                found[group.part][group.name] = {"failed": failed[group.title]}
        for engines, facts in ready:
            found[engines.group.part][engines.group.name] = facts
        spec.save(found)
        tell(f"{len(ready)} of {len(wave)} groups of engines are ready")
        if not ready:
            return failed
        found["is_quiet"] = wait_for("early-stages-over", spec.common_folder, QUIET_SECONDS)
        for engines, facts in ready:
            try:
                engines.measure(_keeper(spec, found, facts, engines.group.title))
            except CaptureError as error:
                failed[engines.group.title] = facts["failed"] = str(error)
        return failed
    finally:
        _close([engines for engines, _ in loaded.values()])


def start_groups(
    spec: PartSpec, groups: Sequence[Group], start: Start, seconds: float
) -> tuple[dict[Engines, dict[str, Any]], dict[str, str]]:
    """Start the processes of groups and load them; see `load_all`."""
    began = time.perf_counter()
    running = [Engines(group, Path(spec.folder) / group.part / group.name, spec.devices) for group in groups]
    try:
        for engines in running:
            engines.start(start)
    except (OSError, EOFError) as error:  # the process that forks others has ended
        _close(running)
        return {}, {group.title: f"not started ({type(error).__name__}: {error})" for group in groups}
    return load_all(running, seconds - (time.perf_counter() - began))


def load_all(
    running: Sequence[Engines], seconds: float
) -> tuple[dict[Engines, dict[str, Any]], dict[str, str]]:
    """Load groups side by side; those that fail or take longer are ended.

    Returns:
        Groups that are loaded, in order, with what they say; why the others are not, by title.
    """
    pool = ThreadPoolExecutor(len(running))
    loads = {engines: pool.submit(_timed_load, engines) for engines in running}
    wait(loads.values(), timeout=seconds)
    loaded: dict[Engines, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for engines, load in loads.items():
        title = engines.group.title
        if not load.done():
            failed[title] = f"not loaded after {seconds:.0f} s"
        elif (error := load.exception()) is not None:
            failed[title] = str(error)
        else:
            loaded[engines] = load.result()
    for title, reason in failed.items():
        tell(f"{title}: {reason}")
    _close([engines for engines in running if engines.group.title in failed])
    pool.shutdown()
    return loaded, failed


def _timed_load(engines: Engines) -> dict[str, Any]:
    started = time.perf_counter()
    facts = engines.load()
    seconds = time.perf_counter() - started
    tell(f"{engines.group.title}: {len(facts['processes'])} engines loaded and warm after {seconds:.0f} s")
    return facts | {"load_seconds": seconds}


def _close(running: Sequence[Engines]) -> None:
    if running:
        with ThreadPoolExecutor(len(running)) as pool:
            list(pool.map(Engines.close, running))


def _keeper(
    spec: PartSpec, found: dict[str, Any], facts: dict[str, Any], title: str
) -> Callable[[list[dict[str, Any]]], None]:
    """Keeps, shows and saves the rounds of a group as they are measured."""

    def keep(rounds: list[dict[str, Any]]) -> None:
        facts["rounds"], facts["tokens_per_second"] = rounds, summary(rounds)
        spec.save(found)
        last = rounds[-1]
        tell(
            f"{title}: {last['mode']}, {last['engines']} engines: "
            f"{last['tokens'] / last['seconds']:,.0f} tokens/s in {last['seconds']:.1f} s, "
            f"{last['stored_bytes'] / last['seconds'] / 1e9:.2f} GB/s stored"
        )

    return keep


if __name__ == "__main__":
    serve(measure)
