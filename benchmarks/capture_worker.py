"""One engine of the capture benchmark, in a process of its own.

`python -m benchmarks.capture_worker SPEC MODE`: MODE is `plain` (prefill alone) or `capture` (prefill, and
states hashed and stored). The process imports the engine, then answers commands on standard input, one a
line, with facts on standard output, each `PREFIX` and JSON:

    benchmark: load          worker: {"event": "loaded", "engine": "vllm 0.26.0", ...}
    benchmark: round 2       worker: {"event": "done", "seconds": 14.2, ...}

It ends when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict

from benchmarks.engine_import import import_engine
from eagle3_core.artifacts import FileEntry
from eagle3_core.capture.job import CaptureJob, iter_take
from eagle3_core.config import RunConfig
from eagle3_core.step import end_process
from eagle3_core.store.dataset import read_dataset
from eagle3_core.store.shards import PlannedShard
from eagle3_core.target.info import inspect_target

PREFIX = "@capture-benchmark "
Captured = Iterator[tuple[PlannedShard, FileEntry]]


class WorkerSpec(BaseModel):
    """What a worker is started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    config: RunConfig
    target_path: str
    job: CaptureJob
    rounds: tuple[tuple[int, int], ...]
    """Each round's shards as a range of `job.shards`; the first one is for warming up."""
    eager: bool
    dummy: bool = False
    """Whether the engine makes up weights instead of reading them (vLLM)."""

    def shards_of(self, number: int) -> tuple[PlannedShard, ...]:
        """The shards of a round."""
        start, end = self.rounds[number]
        return self.job.shards[start:end]


@dataclass
class Round:
    """What one round of an engine took.

    Attributes:
        began: by this host's monotonic clock.
        seconds: until the last prompt was computed, or the last shard was on disk.
        last_token_seconds: until the last prompt was computed.
        tokens: prompt tokens.
        stored_bytes: of finished shards.
        num_shards: finished shards.
        most_in_flight: shards that had been begun and were not finished, at most.
    """

    began: float = 0.0
    seconds: float = 0.0
    last_token_seconds: float = 0.0
    tokens: int = 0
    stored_bytes: int = 0
    num_shards: int = 0
    most_in_flight: int = 0


class Engine(ABC):
    """A loaded engine, in one of both modes.

    Args:
        spec: what is measured.
        captures: whether states are captured.
    """

    def __init__(self, spec: WorkerSpec, captures: bool) -> None:
        self._spec, self._captures = spec, captures
        self._samples = read_dataset(Path(spec.job.dataset_folder))
        self._info = inspect_target(Path(spec.target_path))
        self._longest = max(map(len, self._samples))
        self._num_tokens = 0
        self._last_token = 0.0

    def run(self, number: int) -> Round:
        """Run a round's prompts and remove what was stored.

        Raises:
            RuntimeError: tokens or states are missing.
        """
        shards = self._spec.shards_of(number)
        samples = self._samples[shards[0].start : shards[-1].end]
        wanted = sum(map(len, samples))
        self._num_tokens, started = 0, time.perf_counter()
        if self._captures:
            result = self._capture(shards)
        else:
            self._num_tokens = self._prefill([sample.input_ids.tolist() for sample in samples])
            self._last_token = time.perf_counter()
            result = Round()
        result.began, result.seconds = started, time.perf_counter() - started
        result.last_token_seconds = self._last_token - started
        result.tokens = self._num_tokens
        if self._num_tokens != wanted or (self._captures and result.num_shards != len(shards)):
            raise RuntimeError(f"{self._num_tokens} of {wanted} tokens, {result.num_shards} shards")
        return result

    def _capture(self, shards: Sequence[PlannedShard]) -> Round:
        result, running = Round(), 0
        next_shard = iter_take(shards)

        def take() -> PlannedShard | None:
            nonlocal running
            shard = next_shard()
            running += shard is not None
            result.most_in_flight = max(result.most_in_flight, running)
            return shard

        job = self._spec.job.model_copy(update={"shards": tuple(shards)})
        for _, entry in self._captured(job, take):
            running -= 1
            result.num_shards += 1
            result.stored_bytes += entry.bytes
        return result

    def _on_tokens(self, count: int) -> None:
        if count:
            self._num_tokens += count
            self._last_token = time.perf_counter()

    @abstractmethod
    def _captured(self, job: CaptureJob, take: Callable[[], PlannedShard | None]) -> Captured: ...

    @abstractmethod
    def _prefill(self, prompts: list[list[int]]) -> int:
        """Compute all prompts; returns the tokens that the engine says it ran."""

    @abstractmethod
    def close(self) -> None:
        """End the engine."""


class VllmEngine(Engine):
    """vLLM in this process, through the capture's own driver and connector."""

    CAPTURE_ARGUMENTS = ("speculative_config", "kv_transfer_config")

    def __init__(self, spec: WorkerSpec, captures: bool) -> None:
        from eagle3_core.capture.vllm_engine import check_settings, engine_arguments
        from eagle3_core.target.vllm_engine import load_vllm

        super().__init__(spec, captures)
        arguments = engine_arguments(spec.config, self._info, spec.job, self._longest)
        if not captures:
            for name in self.CAPTURE_ARGUMENTS:
                del arguments[name]
        if spec.eager:
            arguments["enforce_eager"] = True
        if spec.dummy:
            arguments["load_format"] = "dummy"
        self._llm = load_vllm(spec.config, spec.target_path, **arguments, skip_tokenizer_init=True)
        check_settings(self._llm.llm_engine.vllm_config, self._longest)

    def _captured(self, job: CaptureJob, take: Callable[[], PlannedShard | None]) -> Captured:
        from eagle3_core.capture.vllm_engine import VllmDriver

        return VllmDriver(self._llm, job, self._samples, self._on_tokens, take).run()

    def _prefill(self, prompts: list[list[int]]) -> int:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        return sum(len(o.prompt_token_ids or ()) - (o.num_cached_tokens or 0) for o in outputs)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class SglangEngine(Engine):
    """SGLang in this process, through the capture's own driver and hooks."""

    def __init__(self, spec: WorkerSpec, captures: bool) -> None:
        from eagle3_core.capture.sglang_plan import check_settings, engine_arguments, num_checks, variant_of
        from eagle3_core.capture.sglang_transport import InProcess

        super().__init__(spec, captures)
        variant = variant_of(spec.config, self._info)
        arguments = engine_arguments(spec.config, self._info, spec.job, self._longest, variant)
        if spec.config.engine.device == "cpu":
            arguments["sleep_on_idle"] = True  # the other engine has the cores meanwhile
        if not captures:
            import sglang

            del arguments["forward_hooks"]
            self._plain = sglang.Engine(**arguments)
            return
        self._transport = InProcess(arguments)
        check_settings(self._transport.settings(), self._longest)
        self._driver(spec.job, None).check_hooks(num_checks(variant))

    def _driver(self, job: CaptureJob, take: Callable[[], PlannedShard | None] | None) -> Any:
        from eagle3_core.capture.sglang_engine import SglangDriver

        return SglangDriver(self._spec.config, self._transport, job, self._samples, self._on_tokens, take)

    def _captured(self, job: CaptureJob, take: Callable[[], PlannedShard | None]) -> Captured:
        return self._driver(job, take).run()

    def _prefill(self, prompts: list[list[int]]) -> int:
        from eagle3_core.capture.sglang_transport import NEW_TOKENS

        replies = self._plain.generate(input_ids=prompts, sampling_params=NEW_TOKENS)
        facts = [reply["meta_info"] for reply in replies]
        return sum(fact["prompt_tokens"] - fact["cached_tokens"] for fact in facts)

    def close(self) -> None:
        if self._captures:
            self._transport.close()
        else:
            self._plain.shutdown()


ENGINES: dict[str, type[Engine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


def say(event: str, **facts: Any) -> None:
    """Send one answer."""
    os.write(1, f"{PREFIX}{json.dumps({'event': event, **facts})}\n".encode())


def device_name(device: str) -> str:
    """The accelerator's name, or `cpu`."""
    import torch

    return torch.cuda.get_device_name(0) if device == "cuda" else "cpu"


def remove_stored(folder: Path, shards: Sequence[PlannedShard]) -> None:
    """Remove the files of a round's shards and their entries."""
    for shard in shards:
        (folder / shard.file_name).unlink(missing_ok=True)
        (folder / f"{Path(shard.file_name).stem}.entry.json").unlink(missing_ok=True)


def serve(path: str, mode: str) -> NoReturn:
    """Serve commands until standard input ends, then end the process."""
    spec = WorkerSpec.model_validate_json(Path(path).read_text())
    name = spec.config.capture.engine
    imported = import_engine(name)
    engine: Engine | None = None
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "load":
            started = time.perf_counter()
            engine = ENGINES[name](spec, mode == "capture")
            seconds = time.perf_counter() - started
            device = device_name(spec.config.engine.device)
            say("loaded", device=device, load_seconds=seconds, **imported)
            continue
        assert engine is not None, line
        number = int(arguments[0])
        taken = engine.run(number)
        # Before the answer: whoever is asked for a round next has to begin at once, beside others.
        remove_stored(Path(spec.job.folder), spec.shards_of(number))
        say("done", **asdict(taken))
    if engine is not None:
        engine.close()
    end_process(0)


if __name__ == "__main__":
    serve(*sys.argv[1:])
