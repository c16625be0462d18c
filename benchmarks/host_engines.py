"""Groups of engines that hold one target in one way, and the rounds that they are asked for.

A group has one engine for plain prefill, and one or more that capture.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.capture import prepare
from benchmarks.capture_process import Process, Worker, ask_all, close_all
from benchmarks.capture_worker import WorkerSpec
from eagle3_core.capture.replica import replica_variables

REPEATS = 2
"""Measured rounds of each kind."""
CLOSE_SECONDS = 5.0
COMMON = ("engine", "device", "import_seconds", "import_cpu_seconds", "keeps_bytecode")
"""What forks of one process say alike."""
Start = Callable[[Path, str, Mapping[str, str]], Process]


@dataclass(frozen=True)
class Group:
    """Engines that hold one target in one way.

    Attributes:
        part: of the table.
        name: `replicas` or `tensor_parallel`.
        options: of the capture benchmark; `shape` is the target's folder.
        num_capturing: engines that capture side by side.
    """

    part: str
    name: str
    options: Namespace
    num_capturing: int

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.part}, {self.name.replace('_', ' ')}"


def plan_rounds(num_capturing: int) -> list[tuple[str, int, int]]:
    """Mode, engines and number of each measured round; no engine gets a number twice, 0 is for warming up.

    >>> plan_rounds(8)[:3]
    [('plain', 1, 1), ('capture', 1, 1), ('capture', 8, 2)]
    """
    kinds = [("plain", 1), ("capture", 1)] + ([("capture", num_capturing)] if num_capturing > 1 else [])
    used: Counter[str] = Counter()
    rounds = []
    for turn in range(REPEATS):
        for mode, engines in reversed(kinds) if turn % 2 else kinds:
            used[mode] += 1
            rounds.append((mode, engines, used[mode]))
    return rounds


def num_rounds(num_capturing: int) -> int:
    """Rounds that an engine has prompts for, without the one to warm up."""
    return max(number for _, _, number in plan_rounds(num_capturing))


class Engines:
    """The processes of a group; their prompts are written when it is made.

    Args:
        group: what they are.
        folder: for their prompts, shards and logs.
        devices: GPUs as `CUDA_VISIBLE_DEVICES` names them; none on the CPU.
    """

    def __init__(self, group: Group, folder: Path, devices: Sequence[str]) -> None:
        self.group = group
        options, count = group.options, group.num_capturing
        files = [prepare(options, Path(options.shape), folder / f"engine-{index}") for index in range(count)]
        config = WorkerSpec.model_validate_json(files[0].read_text()).config
        variables = replica_variables(config, count, list(devices))
        self._places = list(zip(files, variables, strict=True))
        self._workers: dict[str, list[Worker]] = {"plain": [], "capture": []}

    def start(self, start: Start) -> None:
        """Start all processes; they import nothing of an engine yet, or have it already."""
        for mode, workers in self._workers.items():
            for file, own in self._places[: 1 if mode == "plain" else None]:
                workers.append(Worker(file, mode, own, watch_memory=False, start=start))

    def load(self) -> dict[str, Any]:
        """Load all engines side by side, each with a round to warm up; returns what each process took.

        Raises:
            CaptureError: an engine ended.
        """
        named = [(mode, i, one) for mode, workers in self._workers.items() for i, one in enumerate(workers)]
        with ThreadPoolExecutor(len(named)) as pool:
            processes = list(pool.map(lambda each: _load(*each), named))
        common = {key: value for key, value in processes[0].items() if key in COMMON}
        return {
            **common,
            "engines": self.group.num_capturing,
            "gpus_of_an_engine": self.group.options.tensor_parallel,
            "processes": [{k: v for k, v in each.items() if k not in COMMON} for each in processes],
        }

    def measure(self, on_round: Callable[[list[dict[str, Any]]], None]) -> None:
        """Ask for all rounds, one after the other; `on_round` gets those so far after each.

        Raises:
            CaptureError: an engine ended.
        """
        rounds: list[dict[str, Any]] = []
        for mode, count, number in plan_rounds(self.group.num_capturing):
            taken = _round(self._workers[mode][:count], number)
            rounds.append({"mode": mode, "engines": count, **taken})
            on_round(rounds)

    def close(self) -> None:
        """End all processes."""
        if workers := [worker for each in self._workers.values() for worker in each]:
            close_all(workers, CLOSE_SECONDS)


def _load(mode: str, index: int, worker: Worker) -> dict[str, Any]:
    started = time.perf_counter()
    answer = worker.ask("load")
    del answer["event"]
    warm_up = worker.ask("round 0")["seconds"]
    ready = time.perf_counter() - started
    return {"mode": mode, "index": index, **answer, "warm_up_seconds": warm_up, "ready_seconds": ready}


def _round(workers: Sequence[Worker], number: int) -> dict[str, Any]:
    """One round of some engines at once, from the first one's start to the last one's end."""
    answers = ask_all(workers, f"round {number}")
    ended = max(answer["began"] + answer["seconds"] for answer in answers)
    return {
        "seconds": ended - min(answer["began"] for answer in answers),
        "tokens": sum(answer["tokens"] for answer in answers),
        "stored_bytes": sum(answer["stored_bytes"] for answer in answers),
        "engine_seconds": [answer["seconds"] for answer in answers],
        "last_token_seconds": [answer["last_token_seconds"] for answer in answers],
    }


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median tokens per second by mode and number of engines, which is text as in JSON."""
    speeds: dict[str, dict[str, list[float]]] = {}
    for taken in rounds:
        of_mode = speeds.setdefault(taken["mode"], {})
        of_mode.setdefault(str(taken["engines"]), []).append(taken["tokens"] / taken["seconds"])
    return {mode: {n: statistics.median(each) for n, each in found.items()} for mode, found in speeds.items()}
