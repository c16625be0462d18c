"""Keeps this host's engines working on a capture's shards, and decides what a dead engine means.

An engine that dies is started again and its shards are done again. What it was computing when it died is
suspected: the next session sends these samples first, one at a time, so that a sample which kills the engine
again is alone and named; it is then quarantined, and the session after goes on without it. An engine that
dies of whatever it is given convicts nobody: where no sample at all was computed, the quarantine is lifted.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from eagle3_core.capture.job import CaptureJob, Later
from eagle3_core.capture.replica import Replica, SessionEnd, SessionHooks, num_replicas, replica_variables
from eagle3_core.capture.room import Pauses, ShardRoom
from eagle3_core.capture.shard_queue import ShardQueue, Staging
from eagle3_core.config import RunConfig
from eagle3_core.errors import CaptureError, DiskFullError
from eagle3_core.host.gpus import visible_gpus
from eagle3_core.store.dataset import Sample
from eagle3_core.store.shards import PlannedShard

MAX_FRUITLESS_DEATHS = 3
"""Engines that may die in a row without a shard finished or a sample quarantined in between."""

logger = logging.getLogger(__name__)


class EnginePool:
    """The engines of this host.

    Args:
        config: the run's.
        target_path: folder of the target.
        job: what every session's job is made from; its shards are all of the capture.
        samples: all samples of the dataset, in order.
        queue: of this host.
        staging: of the capture.
        on_tokens: called with newly captured tokens, negative for those of a session that died.
        on_loaded: called when an engine is loaded.
        room: on the disk.
        pauses: told of engines that wait for space.
    """

    def __init__(
        self,
        config: RunConfig,
        target_path: str,
        job: CaptureJob,
        samples: Sequence[Sample],
        queue: ShardQueue,
        staging: Staging,
        on_tokens: Callable[[int], None],
        on_loaded: Callable[[], None],
        room: ShardRoom,
        pauses: Pauses,
    ) -> None:
        self._config, self._job, self._samples = config, job, samples
        self._queue, self._staging = queue, staging
        self._on_tokens, self._on_loaded = on_tokens, on_loaded
        self._room, self._pauses = room, pauses
        self._shard_of = {
            sample.key: shard.index for shard in job.shards for sample in samples[shard.start : shard.end]
        }
        devices = visible_gpus() if config.engine.device == "cuda" else []
        count = num_replicas(config, devices)
        self._replicas = [
            Replica(index, config, target_path, variables, f"[replica {index}] " if count > 1 else "")
            for index, variables in enumerate(replica_variables(config, count, devices))
        ]
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._fruitless = 0
        self._loaded_again: set[int] = set()
        self._has_computed = False
        self._convicted: list[str] = []
        self._error: BaseException | None = None
        self._full: DiskFullError | None = None
        self.num_restarts = 0

    @property
    def is_working(self) -> bool:
        """Whether an engine of this host is at work."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start the replicas that can get a shard.

        Raises:
            CaptureError: more samples are quarantined than the limit.
        """
        self._check_limit(list(self._staging.quarantined()))
        missing = len(self._queue.missing())
        self._threads = [
            threading.Thread(target=self._work, args=(replica,), name=f"replica-{replica.index}")
            for replica in self._replicas[:missing]
        ]
        for thread in self._threads:
            thread.start()

    def raise_error(self) -> None:
        """Raise what ended a replica for good, once all have ended."""
        error = self._error or self._full
        if error is not None and not self.is_working:
            raise error

    def stop(self) -> None:
        """End all sessions and wait for them."""
        self._error = self._error or CaptureError("the capture was stopped")
        for thread in self._threads:
            thread.join()

    def _work(self, replica: Replica) -> None:
        try:
            while self._error is None and self._full is None and self._queue.has_work():
                session = self._room.guard.patiently(
                    lambda: _Session(self, replica), self._staging.path, 0, "an engine's session"
                )
                try:
                    end = replica.run(session.job, session.hooks)
                finally:
                    self._pauses.set(replica.index, None)
                    shutil.rmtree(session.job.folder, ignore_errors=True)
                if end.kind == "done" and not session.shards:
                    return
                self._judge(replica, session, end)
        except BaseException as error:
            self._error = self._error or error

    def _judge(self, replica: Replica, session: _Session, end: SessionEnd) -> None:
        """Give back what a session leaves unfinished, and decide whether to go on."""
        if end.kind == "failed":
            if not self._may_load_again(replica, end):
                raise end.error or CaptureError(end.reason)
            logger.warning("%s%s; it is loaded once more", replica.label, end.reason)
            return
        unfinished = [index for index, is_done in session.shards.items() if not is_done]
        if end.kind == "done" and not unfinished:
            return
        if end.kind == "died" and end.was_paused:
            self._on_tokens(-session.unpublished_tokens)
            self._queue.give_back(unfinished, [], self._shard_of)
            logger.warning("%s%s while it waited for space", replica.label, end.reason)
            return
        if end.kind == "done":
            end = SessionEnd("died", "the engine ended before its shards were written")
        with self._lock:
            self.num_restarts += 1
            self._on_tokens(-session.unpublished_tokens)
            self._has_computed |= end.has_computed
            self._queue.give_back(unfinished, end.in_flight, self._shard_of)
            names = ", ".join(self._job_shard(index).file_name for index in unfinished) or "no shard"
            logger.warning("%s%s; %s will be done again", replica.label, end.reason, names)
            if not self._quarantine(session.job, end):
                self._fruitless += 1
            if self._fruitless >= MAX_FRUITLESS_DEATHS:
                raise CaptureError(
                    f"{self._job.engine} died {self._fruitless} times in a row without finishing a shard; "
                    f"at last: {end.reason}",
                    remedy="the log says why; lower capture.max_batched_tokens or engine.max_num_seqs if "
                    "memory ran out",
                ) from end.error

    def _may_load_again(self, replica: Replica, end: SessionEnd) -> bool:
        """Once for each: engines that load at once can get into each other's way, as with a port."""
        is_load = not end.was_loaded and not isinstance(end.error, DiskFullError)
        if not is_load or len(self._threads) < 2 or replica.index in self._loaded_again:
            return False
        self._loaded_again.add(replica.index)
        return True

    def _quarantine(self, job: CaptureJob, end: SessionEnd) -> bool:
        """Quarantine a sample that killed an engine again, alone; returns whether there was one.

        Raises:
            CaptureError: more of them than the limit, or the engine has computed none of all its samples.
        """
        if len(end.in_flight) != 1 or end.in_flight[0] not in job.alone:
            return False
        key = end.in_flight[0]
        self._check_limit([*self._staging.quarantined(), key])
        self._convicted.append(key)
        if not self._has_computed and len(self._convicted) >= MAX_FRUITLESS_DEATHS:
            self._lift_quarantine()
            raise CaptureError(
                f"{self._job.engine} died of {', '.join(self._convicted)}, each alone, and computed no "
                f"sample at all; at last: {end.reason}",
                remedy="the log says why: the engine does not run here, whatever the sample",
            ) from end.error
        self._staging.quarantine(key, f"killed {self._job.engine} twice: {end.reason}")
        self._queue.acquit(key, self._shard_of[key])
        self._fruitless = 0
        logger.warning("sample %s killed the engine twice, the second time alone: quarantined", key)
        return True

    def _check_limit(self, keys: list[str]) -> None:
        """Refuse to leave out more samples than the limit; the last one is not quarantined then."""
        limit = self._config.capture.max_quarantined_samples
        if len(keys) > limit:
            if not self._has_computed:
                self._lift_quarantine()
            raise CaptureError(
                f"{len(keys)} samples kill the engine ({', '.join(keys[:5])})",
                expected=f"at most {limit} (capture.max_quarantined_samples)",
                remedy="see why they do, or raise the limit",
            )

    def _lift_quarantine(self) -> None:
        for key in self._convicted:
            self._staging.lift_quarantine(key)

    def _job_shard(self, index: int) -> PlannedShard:
        return next(shard for shard in self._job.shards if shard.index == index)

    def next_job(self) -> CaptureJob:
        """The job of a new session: with a folder of its own and what is known of samples by now."""
        with self._lock:
            name = f"{session_prefix()}{uuid.uuid4().hex[:12]}"
            return self._job.model_copy(
                update={
                    "folder": str(self._staging.open_session(name)),
                    "shards": tuple(self._queue.missing()),
                    "left_out": tuple(self._staging.quarantined()),
                    "alone": self._queue.suspects(),
                }
            )

    def check(self) -> None:
        """Ends a session, called in its thread, when another replica has failed for good."""
        if self._error is not None:
            raise CaptureError("another replica failed")

    def publish(self, replica: Replica, session: _Session, index: int) -> None:
        """Publish a shard that a session has written."""
        shard, begun = self._job_shard(index), session.begun[index]
        left_out = set(session.job.left_out)
        keys = [s.key for s in self._samples[shard.start : shard.end] if s.key in left_out]
        facts: dict[str, object] = {
            "engine": self._job.engine,
            "host": socket.gethostname(),
            "attempts": self._queue.attempts(index),
            "seconds": round(time.monotonic() - begun, 3),
        }
        if keys:
            reasons = self._staging.quarantined()
            facts["quarantined"] = {key: reasons.get(key, "killed an engine twice") for key in keys}
        if not self._queue.publish(index, session.job, facts):
            logger.warning("%s%s was taken over by another host", replica.label, shard.file_name)
        self._fruitless = 0
        self._has_computed |= bool(session.job.samples_of(shard, self._samples))

    def count(self, tokens: int) -> None:
        """Count captured tokens of any session."""
        self._on_tokens(tokens)

    def loaded(self) -> None:
        """An engine is loaded."""
        self._on_loaded()

    def take(self, deaths_known: int) -> PlannedShard | Later | None:
        """The next shard for a session; none any more once the disk is full and the policy is to fail."""
        if self._error is not None or self._full is not None:
            return None
        try:
            return self._queue.take(deaths_known, self._room.may_begin)
        except DiskFullError as full:
            logger.error("%s; shards in work are finished first", full)
            self._full = full
            return None

    def paused(self, replica: Replica, reason: str | None) -> None:
        """A session waits for space, or does not."""
        self._pauses.set(replica.index, reason)

    def num_tokens(self, shard: PlannedShard, job: CaptureJob) -> int:
        """Tokens that a session captures for a shard."""
        return sum(map(len, job.samples_of(shard, self._samples)))

    @property
    def deaths(self) -> int:
        """Engines of this host that have died."""
        return self._queue.deaths


def session_prefix() -> str:
    """Begins the name of every session of this process."""
    return f"{socket.gethostname()}-{os.getpid()}-"


class _Session:
    """One engine session: its job, what it was given and what it has finished."""

    def __init__(self, pool: EnginePool, replica: Replica) -> None:
        self._pool, self._replica = pool, replica
        self._deaths_known = pool.deaths
        self.job = pool.next_job()
        self.shards: dict[int, bool] = {}
        self.begun: dict[int, float] = {}
        self._tokens = 0
        self._shard_tokens: dict[int, int] = {}
        self.hooks = SessionHooks(
            self._take, self._written, self._count, pool.loaded, pool.check,
            functools.partial(pool.paused, replica),
        )  # fmt: skip

    @property
    def unpublished_tokens(self) -> int:
        """Tokens that were counted for shards that are not there."""
        return max(0, self._tokens - sum(self._shard_tokens[i] for i, done in self.shards.items() if done))

    def _take(self) -> int | Later | None:
        shard = self._pool.take(self._deaths_known)
        if shard is None or isinstance(shard, Later):
            return shard
        self.shards[shard.index], self.begun[shard.index] = False, time.monotonic()
        self._shard_tokens[shard.index] = self._pool.num_tokens(shard, self.job)
        return shard.index

    def _written(self, index: int) -> None:
        self._pool.publish(self._replica, self, index)
        self.shards[index] = True

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
        self._pool.count(tokens)
