"""The engine: one thread that owns the model and gives every active answer one turn after another."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter

import torch

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.generation import Generation, Job, Shared
from agentspec.backends.torch.kv_cache import SequenceCache
from agentspec.backends.torch.memory import Memory
from agentspec.backends.torch.model import Rows
from agentspec.backends.torch.prefix_store import PrefixStore
from agentspec.errors import AgentSpecError, EngineError, OverloadedError, ShuttingDownError
from agentspec.telemetry.place import place_of

logger = logging.getLogger(__name__)

JOIN_SECONDS = 60.0
ANSWER_SECONDS = 5.0  # the first guess at how long an answer takes, for Retry-After
ROOM = 64  # rows reserved beyond prompt and answer for drafts


class Engine:
    """Runs jobs to their end. `submit`, `cancel` and `close` may be called from any thread.

    At most `max_active` jobs are decoded, in turns; `max_queue` more wait in order of arrival. What goes wrong in one
    job is delivered to that job alone.
    """

    def __init__(self, shared: Shared, settings: TorchSettings, open_memory: Callable[[Job], Memory]) -> None:
        self.shared = shared
        self.prefixes = PrefixStore(int(settings.prefix_bytes) if shared.target.rewindable else 0)
        self._settings = settings
        self._open_memory = open_memory
        self._waiting: deque[Job] = deque()
        self._active: deque[Generation] = deque()
        self._jobs: set[Job] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._answer_seconds = ANSWER_SECONDS
        self._thread = threading.Thread(target=self._run, name="agentspec-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises `OverloadedError` when the queue is full and `ShuttingDownError` after `close`."""
        with self._changed:
            if self._closing:
                raise ShuttingDownError("the engine is shutting down")
            if len(self._jobs) >= self._settings.max_active + self._settings.max_queue:
                retry = max(1.0, self._answer_seconds * len(self._waiting) / self._settings.max_active)
                raise OverloadedError(f"{len(self._waiting)} requests wait already", retry_after=round(retry, 1))
            self._jobs.add(job)
            self._waiting.append(job)
            self.shared.counters.requests += 1
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Free the job's place now; its work ends before its next turn. Does nothing for a finished job."""
        with self._changed:
            if job not in self._jobs:
                return
            job.cancelled = True
            self._jobs.discard(job)
            if job in self._waiting:
                self._waiting.remove(job)
            self.shared.counters.cancelled += 1
            self._changed.notify()

    def close(self) -> None:
        """Fail what runs and waits with `ShuttingDownError`, end the thread and free the rows. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_SECONDS)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._active)

    def _run(self) -> None:
        """The engine's life: wait for work, give one turn, repeat."""
        error: AgentSpecError = ShuttingDownError("the engine was shut down")
        try:
            with torch.inference_mode():
                while (generation := self._next()) is not None:
                    self._turn(generation)
        except BaseException as cause:
            logger.error("the engine's thread ended: %s", place_of(cause))
            error = EngineError(f"the engine stopped: {type(cause).__name__}")
        finally:
            self._end_all(error)

    def _next(self) -> Generation | None:
        """Whose turn it is, the waiting admitted first; None when the engine closes."""
        while True:
            with self._changed:
                while not (self._closing or self._waiting or self._active):
                    self._changed.wait()
                if self._closing:
                    return None
                free = self._settings.max_active - sum(not generation.job.cancelled for generation in self._active)
                admitted = self._waiting.popleft() if self._waiting and free > 0 else None
            if admitted is not None:
                self._admit(admitted)
            elif self._active:
                self._active.rotate(-1)
                return self._active[-1]

    def _admit(self, job: Job) -> None:
        try:
            rows = self._rows(job)
            memory = self._open_memory(job)
        except Exception as error:
            self._fail(job, error)
            return
        try:
            self._active.append(Generation(job, self.shared, rows, memory))
        except Exception as error:
            memory.close(clean=False)
            self._fail(job, error)

    def _rows(self, job: Job) -> Rows:
        """Rows of an earlier call for as much of the prompt as they cover, at least its last token excepted."""
        capacity = len(job.prompt) + job.max_tokens + ROOM
        capacity = min(capacity, len(job.prompt) + 8 * ROOM)
        found = self.prefixes.find(job.request.tenant, job.prompt[:-1], capacity)
        if found is not None:
            self.shared.counters.reused_tokens += found.length
        return found or self.shared.target.new_rows(capacity)

    def _turn(self, generation: Generation) -> None:
        if generation.job.cancelled:
            self._leave(generation, clean=False)
            return
        try:
            delta = generation.advance()
        except Exception as error:
            self._leave(generation, clean=False)
            self._fail(generation.job, error)
            return
        if generation.finish is not None:  # first, so that a client's next call finds this one's rows and tokens
            self._leave(generation, clean=True)
        if delta is not None:
            generation.job.deliver(delta)

    def _leave(self, generation: Generation, *, clean: bool) -> None:
        """Take a generation out; the rows of one that ended well serve the next call."""
        self._active.remove(generation)
        with self._changed:
            self._jobs.discard(generation.job)
        generation.close(clean=clean)
        if clean:
            self._keep(generation)
            self._answer_seconds += 0.2 * (perf_counter() - generation.started - self._answer_seconds)

    def _keep(self, generation: Generation) -> None:
        rows, request = generation.rows, generation.job.request
        if not (request.store and isinstance(rows, SequenceCache)):
            return
        try:
            self.prefixes.keep(request.tenant, generation.tokens[: rows.length], rows)
        except (MemoryError, RuntimeError) as error:  # no room to copy them: the answer is whole all the same
            logger.warning("the rows of an answer are not kept for the next call: %s", error)
            self.prefixes.clear()

    def _fail(self, job: Job, error: Exception) -> None:
        with self._changed:
            self._jobs.discard(job)
        self.shared.counters.failed += 1
        if not isinstance(error, AgentSpecError):
            logger.error("a request failed: %s", place_of(error))
            reason = ""
            if is_out_of_memory(error):
                self.prefixes.clear()
                reason = ": out of memory"
            cause, error = error, EngineError(f"the engine failed on this request{reason}")
            error.__cause__ = cause
        job.deliver(error)

    def _end_all(self, error: AgentSpecError) -> None:
        with self._changed:
            self._closing = True
            jobs = [job for job in self._jobs if not job.cancelled]
            self._waiting.clear()
            self._jobs.clear()
        for generation in self._active:
            generation.close(clean=False)
        self._active.clear()
        self.prefixes.clear()
        for job in jobs:
            job.deliver(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on whichever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
