"""The target answers the prompts itself, turn by turn, through vLLM.

A conversation's next turn is rendered with the target's own answers so far and queued as soon as they are
there, so the engine's batch stays full. Every finished answer is appended to a log: an interrupted run goes
on with what is missing.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_core.config import RunConfig
from eagle3_core.contracts import Rejection
from eagle3_core.data.conversations import Prompt
from eagle3_core.data.template import ChatTemplate
from eagle3_core.errors import DataError
from eagle3_core.step import Progress
from eagle3_core.store.files import append

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

FINISH_REASONS = ("stop", "length")
QUEUED_PER_SEQUENCE = 4
"""Requests handed to the engine for each sequence that it runs at once."""
SYNC_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """One answer of the target.

    Attributes:
        key: the prompt's key.
        turn: user turn that is answered, from 0.
        prompt_ids: exactly what the engine was given.
        token_ids: what it generated; the end-of-turn token is the last one if it stopped.
        text: the answer without the end-of-turn token.
        finish_reason: `stop`, or `length` where max_tokens or the engine's length cut it.
    """

    key: str
    turn: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str


@dataclass
class Regenerated:
    """All answers by prompt key, complete conversations only, and what was left out."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    rejected: list[Rejection] = field(default_factory=list)
    generated_tokens: int = 0
    seconds: float = 0.0


class AnswerLog:
    """Answers on disk, one JSON line each; a line that a crash cut off is dropped when the log is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: io.FileIO | None = None
        self._synced = time.monotonic()

    def open(self) -> list[Answer]:
        """Answers from earlier sessions; the log is then ready for more."""
        content = self._path.read_bytes() if self._path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self._handle = io.FileIO(self._path, "a")
        self._handle.truncate(len(whole))
        return [Answer(**json.loads(line)) for line in whole.splitlines()]

    def append(self, answer: Answer) -> None:
        """Add an answer; it survives the end of this process."""
        assert self._handle is not None, "open the log first"
        append(self._handle, json.dumps(asdict(answer)).encode() + b"\n", self._path)
        if time.monotonic() - self._synced > SYNC_SECONDS:
            os.fsync(self._handle.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            self._handle.close()


def regenerate(
    prompts: Sequence[Prompt],
    chat: ChatTemplate,
    config: RunConfig,
    load_engine: Callable[[], LLM],
    log: AnswerLog,
    progress: Progress,
) -> Regenerated:
    """Answer every user turn of every prompt; the engine is loaded only if an answer is missing.

    Raises:
        DataError: the engine does not report the end-of-turn token of an answer that stopped.
    """
    session = _Session(chat, config, log, progress)
    session.start(prompts)
    if session.queue:
        session.run(load_engine())
    whole = {p.key: session.answers[p.key] for p in prompts if len(session.answers[p.key]) == len(p.turns)}
    return Regenerated(whole, session.rejected, session.generated_tokens, session.seconds)


class _Session:
    """The queue of turns to answer, and the answers so far."""

    def __init__(self, chat: ChatTemplate, config: RunConfig, log: AnswerLog, progress: Progress) -> None:
        self._chat, self._config, self._log, self._progress = chat, config, log, progress
        self.answers: dict[str, list[Answer]] = {}
        self.rejected: list[Rejection] = []
        self.queue: deque[tuple[Prompt, list[int]]] = deque()
        self.generated_tokens = 0
        self.seconds = 0.0
        self._num_finished = self._num_turns = 0

    def start(self, prompts: Sequence[Prompt]) -> None:
        """Take up earlier answers and queue each conversation's next turn, the longest first."""
        self.answers = {prompt.key: [] for prompt in prompts}
        for answer in self._log.open():
            turns = self.answers.get(answer.key)
            if turns is not None and len(turns) == answer.turn:
                turns.append(answer)
        self._num_turns = sum(len(prompt.turns) for prompt in prompts)
        self._num_finished = sum(map(len, self.answers.values()))
        if self._num_finished:
            logger.info("%d of %d answers are there already", self._num_finished, self._num_turns)
        for prompt in sorted(prompts, key=lambda prompt: -self._num_open(prompt)):
            self._enqueue(prompt)

    def run(self, llm: LLM) -> None:
        """Decode until no turn is left."""
        engine = llm.llm_engine
        window = self._config.engine.max_num_seqs * QUEUED_PER_SEQUENCE
        active: dict[str, tuple[Prompt, list[int], list[int]]] = {}
        started = time.monotonic()
        while self.queue or active:
            while self.queue and len(active) < window:
                prompt, ids = self.queue.popleft()
                name = f"{prompt.key}-{len(self.answers[prompt.key])}"
                engine.add_request(name, {"prompt_token_ids": ids}, self._sampling(name, ids))
                active[name] = (prompt, ids, [])
            for output in engine.step():
                prompt, ids, tokens = active[output.request_id]
                tokens += output.outputs[0].token_ids
                self.generated_tokens += len(output.outputs[0].token_ids)
                if output.finished:
                    del active[output.request_id]
                    self._finish(prompt, ids, tokens, output.outputs[0].finish_reason)
            self.seconds = time.monotonic() - started
            self._report()
        self._report(force=True)

    def _num_open(self, prompt: Prompt) -> int:
        return len(prompt.turns) - len(self.answers[prompt.key])

    def _enqueue(self, prompt: Prompt, *, first: bool = False) -> None:
        """Queue the next turn, unless all are answered or it cannot be asked."""
        if not self._num_open(prompt):
            return
        texts = [answer.text for answer in self.answers[prompt.key]]
        try:
            ids = self._chat.prompt_ids(prompt.messages(texts))
        except DataError as error:
            self._reject(prompt, str(error))
            return
        room = self._config.engine.max_model_len - len(ids)
        if room < 1:
            self._reject(
                prompt,
                f"turn {len(texts) + 1} has a prompt of {len(ids):,} tokens, which leaves no room in "
                f"engine.max_model_len {self._config.engine.max_model_len:,}",
            )
        elif first:
            self.queue.appendleft((prompt, ids))
        else:
            self.queue.append((prompt, ids))

    def _finish(self, prompt: Prompt, prompt_ids: list[int], token_ids: list[int], reason: Any) -> None:
        if reason not in FINISH_REASONS:
            self._reject(prompt, f"the engine ended an answer with {reason!r}")
            return
        if reason == "stop" and (not token_ids or token_ids[-1] not in self._chat.end_ids):
            raise DataError(
                f"an answer stopped after {token_ids[-1:]} instead of an end-of-turn token",
                expected=f"one of {sorted(self._chat.end_ids)}, as the target's generation config says",
                remedy="use a supported engine version",
            )
        text = self._chat.decode_answer(token_ids)
        turn = len(self.answers[prompt.key])
        answer = Answer(prompt.key, turn, prompt_ids, token_ids, text, str(reason))
        self._log.append(answer)
        self.answers[prompt.key].append(answer)
        self._num_finished += 1
        self._enqueue(prompt, first=True)

    def _reject(self, prompt: Prompt, reason: str) -> None:
        self._num_turns -= self._num_open(prompt)
        self.rejected.append(Rejection(key=prompt.key, reason=reason))

    def _sampling(self, name: str, prompt_ids: list[int]) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        generation = self._config.data.generation
        digest = hashlib.sha256(f"{generation.seed}/{name}".encode()).digest()
        return SamplingParams(
            temperature=generation.temperature,
            top_p=generation.top_p if generation.temperature else 1.0,
            seed=int.from_bytes(digest[:4], "little") if generation.temperature else None,
            max_tokens=min(generation.max_tokens, self._config.engine.max_model_len - len(prompt_ids)),
            stop_token_ids=sorted(self._chat.end_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _report(self, *, force: bool = False) -> None:
        rate = self.generated_tokens / self.seconds if self.seconds else 0.0
        self._progress(
            self._num_finished,
            self._num_turns,
            "answers",
            "the target answers",
            force=force,
            generated_tokens=self.generated_tokens,
            tokens_per_second=round(rate, 1),
        )
