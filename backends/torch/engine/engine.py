"""The engine: admits jobs and plays step after step, one forward for every active answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import perf_counter

import torch

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.compute_thread import compute_thread
from agentspec.backends.torch.engine.fair_queue import FairQueue
from agentspec.backends.torch.engine.kv_budget import KVBudget
from agentspec.backends.torch.engine.prefix_cache import PrefixCache
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest, Generation
from agentspec.backends.torch.engine.step import run_step
from agentspec.backends.torch.model.kv_cache import Rows, SequenceCache
from agentspec.errors import AgentSpecError, EngineError, OverloadedError, ShuttingDownError
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import Delta

logger = logging.getLogger(__name__)

JOIN_SECONDS = 60.0
ANSWER_SECONDS = 5.0  # the first guess at how long an answer takes, for Retry-After


class Engine:
    """Runs jobs to their end. `submit`, `cancel` and `close` may be called from any thread.

    At most `max_active` jobs are decoded, all in one forward a step; `max_queue` more wait. Lower priorities go first,
    and one that waits takes the place of a higher one, which is put back and goes on later where it stood. What goes
    wrong in one job is delivered to that job alone.
    """

    def __init__(
        self, shared: EngineContext, settings: TorchSettings, open_memory: Callable[[EngineRequest], CacheSession]
    ) -> None:
        self.shared = shared
        self.prefixes = PrefixCache(int(settings.prefix_bytes) if shared.target.rewindable else 0)
        self.rows = KVBudget.of(shared.target, settings.kv_bytes)
        shared.relieve = self.prefixes.clear
        self._settings = settings
        self._open_memory = open_memory
        self._waiting = FairQueue()
        self._active: list[Generation] = []
        self._paused: dict[EngineRequest, Generation] = {}
        self._jobs: set[EngineRequest] = set()
        self._lock = threading.RLock()
        self._closing, self._ended = False, threading.Event()
        self._answer_seconds = ANSWER_SECONDS
        self._thread = compute_thread(shared.target.device)
        self._thread.add(self)

    def submit(self, job: EngineRequest) -> None:
        """Queue a job. Raises `OverloadedError` when the queue is full, `ContextLengthError` for one that the memory
        for rows can never hold, and `ShuttingDownError` after `close`.
        """
        self.rows.check(job)
        with self._lock:
            if self._closing:
                raise ShuttingDownError("the engine is shutting down")
            if len(self._jobs) >= self._settings.max_active + self._settings.max_queue:
                retry = max(1.0, self._answer_seconds * len(self._waiting) / self._settings.max_active)
                raise OverloadedError(f"{len(self._waiting)} requests wait already", retry_after=round(retry, 1))
            self._jobs.add(job)
            self._waiting.push(job)
            self.shared.counters.requests += 1
        self._thread.wake()

    def cancel(self, job: EngineRequest) -> None:
        """Free the job's place now; its work ends before the next step. Does nothing for a finished job."""
        with self._lock:
            if job not in self._jobs:
                return
            job.cancelled = True
            self._jobs.discard(job)
            if job in self._waiting:
                self._waiting.remove(job)
            self.shared.counters.cancelled += 1
        self._thread.wake()

    def close(self) -> None:
        """Fail what runs and waits with `ShuttingDownError` and free the rows. Idempotent."""
        self._closing = True
        self._thread.wake()
        if not self._thread.current:
            self._ended.wait(JOIN_SECONDS)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def kv_rows(self) -> int:
        """Rows reserved by active answers."""
        return self.rows.used(list(self._active))

    @property
    def ready(self) -> bool:
        return bool(self._closing or self._active or self._paused or len(self._waiting))

    def turn(self) -> None:
        """One step. Called by the computing thread alone."""
        try:
            if self._closing:
                self._end(ShuttingDownError("the engine was shut down"))
            else:
                self._step()
        except BaseException as cause:
            logger.error("the engine ended: %s", error_location(cause))
            self._end(EngineError(f"the engine stopped: {type(cause).__name__}"))

    def _step(self) -> None:
        self._drop_cancelled()
        while (job := self._next()) is not None:
            self._admit(job)
        self._make_room()
        if not self._active:
            return
        for generation, outcome in run_step(self._active, self.shared):
            self._finish(generation, outcome)

    def _drop_cancelled(self) -> None:
        for generation in [*self._active, *self._paused.values()]:
            if generation.job.cancelled:
                self._leave(generation, clean=False)

    def _next(self) -> EngineRequest | None:
        """The job to admit now, if there is one and a place and memory for it."""
        with self._lock:
            job = self._waiting.first()
            if job is None:
                return None
            below = [other for other in self._active if other.job.request.priority > job.request.priority]
            if not self._has_room(job, [other for other in self._active if other not in below]):
                return None
            while not self._has_room(job, self._active):
                self._put_back(below.pop(below.index(last_of(below))))
            self._waiting.remove(job)
            return job

    def _has_room(self, job: EngineRequest, others: list[Generation]) -> bool:
        paused = self._paused.get(job)
        rows = self.rows.first(job, None if paused is None else len(paused.tokens))
        return len(others) < self._settings.max_active and self.rows.fits(rows, others)

    def _admit(self, job: EngineRequest) -> None:
        if (paused := self._paused.pop(job, None)) is not None:
            paused.rows = self._rows(job, paused.tokens)
            self._active.append(paused)
            return
        memory: CacheSession | None = None
        try:
            memory = self._open_memory(job)
            self._active.append(Generation(job, self.shared, self._rows(job, job.prompt), memory))
        except Exception as error:
            if memory is not None:
                memory.close(clean=False)
            self._fail(job, error)

    def _rows(self, job: EngineRequest, tokens: list[int]) -> Rows:
        """Rows of an earlier call for as much of `tokens` as they cover, at least the last one excepted."""
        capacity = self.rows.first(job, len(tokens))
        found = self.prefixes.find(job.request.tenant, tokens[:-1], capacity)
        if found is not None:
            self.shared.counters.reused_tokens += found.length
        return found or self.shared.target.new_rows(capacity)

    def _make_room(self) -> None:
        """Every active generation gets room for its part of the step; where there is none, the last ones go back."""
        for generation in sorted(self._active, key=precedence):
            while generation in self._active and not self.rows.grow(generation, self._active):
                self._put_back(last_of(self._active))

    def _put_back(self, generation: Generation) -> None:
        """It gives up its rows and its place, and goes on later from the tokens it has."""
        self._active.remove(generation)
        self._keep(generation)
        generation.rows = self.shared.target.new_rows(1)
        self._paused[generation.job] = generation
        self.shared.counters.preempted += 1
        with self._lock:
            if not generation.job.cancelled:
                self._waiting.put_back(generation.job)

    def _finish(self, generation: Generation, outcome: Delta | Exception | None) -> None:
        """Pass on what a step gave it; at its end, first let go of it, so that a client's next call finds its rows."""
        if isinstance(outcome, Exception):
            self._leave(generation, clean=False)
            self._fail(generation.job, outcome)
            return
        with self._lock:
            self._waiting.charge(generation.job, generation.charged())
        if outcome is not None and generation.job.shares_prompt:
            self._share(generation)
        if generation.finish is not None:
            self._leave(generation, clean=True)
        if outcome is not None:
            generation.job.deliver(outcome)

    def _leave(self, generation: Generation, *, clean: bool) -> None:
        """Take a generation out; the rows of one that ended well serve the next call."""
        if self._paused.pop(generation.job, None) is None:
            self._active.remove(generation)
        with self._lock:
            self._jobs.discard(generation.job)
        generation.close(clean=clean)
        if clean:
            self._keep(generation)
            self._answer_seconds += 0.2 * (perf_counter() - generation.started - self._answer_seconds)

    def _share(self, generation: Generation) -> None:
        """Leave the rows of the prompt for the other choices of the same request."""
        generation.job.shares_prompt = False
        length = len(generation.job.prompt)
        self._keep(generation, lambda rows: rows.copy(length, length))

    def _keep(self, generation: Generation, part: Callable[[SequenceCache], SequenceCache] = lambda rows: rows) -> None:
        rows, request = generation.rows, generation.job.request
        if not (request.store and isinstance(rows, SequenceCache)):
            return
        try:
            kept = part(rows)
            self.prefixes.keep(request.tenant, generation.tokens[: kept.length], kept)
        except (MemoryError, RuntimeError) as error:  # no room to copy them: the answer is whole all the same
            logger.warning("the rows of an answer are not kept for the next call: %s", error)
            self.prefixes.clear()

    def _fail(self, job: EngineRequest, error: Exception) -> None:
        with self._lock:
            self._jobs.discard(job)
        self.shared.counters.failed += 1
        if not isinstance(error, AgentSpecError):
            logger.error("a request failed: %s", error_location(error))
            reason = ""
            if is_out_of_memory(error):
                self.prefixes.clear()
                reason = ": out of memory"
            cause, error = error, EngineError(f"the engine failed on this request{reason}")
            error.__cause__ = cause
        job.deliver(error)

    def _end(self, error: AgentSpecError) -> None:
        with self._lock:
            self._closing = True
            jobs = [job for job in self._jobs if not job.cancelled]
            self._waiting.clear()
            self._jobs.clear()
        for generation in [*self._active, *self._paused.values()]:
            generation.close(clean=False)
        self._active.clear()
        self._paused.clear()
        self.prefixes.clear()
        self._thread.remove(self)
        for job in jobs:
            job.deliver(error)
        self._ended.set()


def precedence(generation: Generation) -> tuple[int, float]:
    """Who keeps its place when there is not enough for all: lower first."""
    return generation.job.request.priority, generation.started


def last_of(generations: list[Generation]) -> Generation:
    return max(generations, key=precedence)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whichever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
