"""Prompts that are expected soon, of which the engine reads what is known while it has nothing else to do."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from agentspec.backends.torch.engine.prefix_cache import SHORTEST, Tokens, common_prefix
from agentspec.cache.deletion import Reach

MOST_JOBS = 32
JOB_SECONDS = 120.0  # a prompt that has not come by then is expected no more
READINGS = 2  # how often a prompt is read at most, if its slots were dropped meanwhile
BOUNDARY = 2  # tokens at the end of what is known that the text behind may change


@dataclass(slots=True, eq=False)
class PrefillJob:
    """`tokens` begin a prompt that `tenant` is expected to send until the time `expires`.

    `read` counts the tokens computed for it so far; in the quiet period `settled` nothing is left to do.
    """

    tenant: str
    tokens: Tokens
    expires: float
    read: int = 0
    settled: int = -1

    @property
    def exhausted(self) -> bool:
        return self.read >= READINGS * len(self.tokens)

    def begins(self, prompt: Tokens) -> bool:
        """Whether `prompt` is the one that was expected."""
        known = max(SHORTEST, len(self.tokens) - BOUNDARY)
        return common_prefix(self.tokens, prompt) >= min(known, len(self.tokens))


@dataclass(slots=True)
class PrefillCounts:
    """Jobs for which tokens were computed, those of them whose prompt came or did not come, and the tokens."""

    launched: int = 0
    used: int = 0
    cancelled: int = 0
    tokens: int = 0


class PrefillQueue:
    """The jobs of one engine, oldest first. Each is looked at again after other work, which may have dropped its
    slots. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.counts = PrefillCounts()
        self._jobs: list[PrefillJob] = []
        self._clock = clock
        self._period = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """Expect a prompt that begins with `tokens`. Where there are too many, the oldest gives way of the tenant that
        has most.
        """
        job = PrefillJob(tenant, np.asarray(tokens, dtype=np.int64), self._clock() + JOB_SECONDS)
        with self._lock:
            same = [one for one in self._jobs if one.tenant == tenant and np.array_equal(one.tokens, job.tokens)]
            for one in same:
                self._jobs.remove(one)
                job.read = max(job.read, one.read)
            self._jobs.append(job)
            while len(self._jobs) > MOST_JOBS:
                held = Counter(one.tenant for one in self._jobs)
                self._cancel(next(one for one in self._jobs if held[one.tenant] == max(held.values())))

    def arrived(self, tenant: str, prompt: Sequence[int]) -> None:
        """A request has come: what it was expected to ask is expected no more, and all else is looked at again."""
        self._period += 1
        if not self._jobs:
            return
        tokens = np.asarray(prompt, dtype=np.int64)
        with self._lock:
            for job in [one for one in self._jobs if one.tenant == tenant and one.begins(tokens)]:
                self._jobs.remove(job)
                self.counts.used += bool(job.read)

    def due(self) -> PrefillJob | None:
        """The job to go on with; None if nothing is left to do until other work comes."""
        if not self._jobs:
            return None
        now = self._clock()
        with self._lock:
            for job in [one for one in self._jobs if one.expires <= now or one.exhausted]:
                self._cancel(job)
            return next((job for job in self._jobs if job.settled != self._period), None)

    def settle(self, job: PrefillJob) -> None:
        """Leave a job alone until other work comes."""
        job.settled = self._period

    def computed(self, job: PrefillJob, tokens: int) -> None:
        """Count tokens that were computed for a job."""
        self.counts.launched += not job.read
        self.counts.tokens += tokens
        job.read += tokens

    def cancel(self, job: PrefillJob) -> None:
        with self._lock:
            if job in self._jobs:
                self._cancel(job)

    def forget(self, reach: Reach) -> None:
        """Expect nothing more of the tenants that a deletion concerns: what was expected may derive from its text."""
        with self._lock:
            for job in [one for one in self._jobs if reach.concerns(one.tenant)]:
                self._cancel(job)

    def clear(self) -> None:
        with self._lock:
            self._jobs.clear()

    def _cancel(self, job: PrefillJob) -> None:
        self._jobs.remove(job)
        self.counts.cancelled += bool(job.read)
