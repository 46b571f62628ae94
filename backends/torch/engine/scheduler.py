"""The scheduler decides which requests wait, which sequences are active and how many tokens each computes in a step."""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort_left, insort_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from traceback import clear_frames
from typing import Any

from torch import Tensor

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine.kv_budget import LEDGER, KVBudget
from agentspec.backends.torch.engine.prefix_cache import PrefixCache
from agentspec.backends.torch.engine.request import EngineRequest
from agentspec.backends.torch.engine.sequence import EngineContext, Sequence
from agentspec.backends.torch.engine.speculator import NOTHING, Proposal, StepEstimate
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import is_device_error
from agentspec.backends.torch.model.kv_cache import KVCache, SequenceCache
from agentspec.cache.deletion import Reach
from agentspec.errors import OverloadedError, ShuttingDownError
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import Delta

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0  # the first estimate of how long an answer takes, for Retry-After


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence's part of one step: it computes `num_tokens` tokens and, if `draws`, samples the token after the last.

    An exception raised for this sequence is stored in `error`; the step goes on with the other sequences.
    """

    sequence: Sequence
    num_tokens: int
    draws: bool
    proposal: Proposal = NOTHING
    logits: Tensor | None = None
    states: Tensor | None = None
    error: Exception | None = None

    @property
    def batch_item(self) -> BatchItem:
        cache, tokens = self.sequence.kv_cache, self.sequence.tokens
        chunk = tokens[cache.length : cache.length + self.num_tokens]
        return BatchItem(cache, chunk, self.proposal.tokens, self.proposal.parents, needs_logits=self.draws)

    def fail(self, error: Exception) -> None:
        """Store the sequence's own error."""
        clear_frames(error.__traceback__)  # the frames keep the failed forward's tensors alive while others are tried
        self.error = error

    def begin(self) -> None:
        assert self.logits is not None
        self.sequence.begin(self.proposal, self.logits, self.states)

    def commit(self, cost: StepEstimate) -> Delta | None:
        if not self.draws:
            self.sequence.commit_chunk(self.num_tokens)
            return None
        return self.sequence.commit(self.num_tokens, self.proposal, cost)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: `scheduled` sequences share a forward; each `scoring` sequence scores its prompt in its own forward.

    `failed` are sequences that could not be resumed, with the reason.
    """

    scheduled: list[ScheduledSequence]
    scoring: list[Sequence]
    failed: Iterable[tuple[Sequence, Exception]] = ()

    @classmethod
    def of(cls, active: Iterable[Sequence], context: EngineContext) -> Schedule:
        """Schedule the sequences that decode first, then prompt chunks in order, within the step's token budget."""
        ready, scoring = [each for each in active if not each.scorer], [each for each in active if each.scorer]
        scheduled = [ScheduledSequence(sequence, 1, draws=True) for sequence in ready if sequence.num_uncomputed == 1]
        targets = [target for each in scheduled if (target := each.sequence.target_seconds_per_token) is not None]
        budget = context.governor.chunk(len(scheduled), kv_length(scheduled), targets)
        for sequence in ready:
            uncomputed = sequence.num_uncomputed
            if uncomputed > 1 and budget > 0:
                # Few recurrent models can continue from a state with several tokens: they read a prompt in one forward.
                tokens = min(uncomputed, budget) if context.target.rewindable else uncomputed
                scheduled.append(ScheduledSequence(sequence, tokens, draws=tokens == uncomputed))
                budget -= tokens
        return cls(scheduled, scoring)


def kv_length(scheduled: Iterable[ScheduledSequence]) -> int:
    """The number of committed KV slots that the tokens of a step attend to."""
    return sum(each.sequence.kv_cache.length for each in scheduled)


class Scheduler:
    """Owns the queue, the key/value memory and the chunking of prompts.

    At most `max_active` sequences are computed, and `max_queue` more requests wait. Those with a lower priority number
    go first, and among equals those that came first. A running one is preempted only when the key/value memory cannot
    grow, and resumes from its tokens.
    Any thread may call `add` and `cancel` and read the counts; all else belongs to the computing thread.
    """

    def __init__(self, context: EngineContext, settings: TorchSettings) -> None:
        self.active: list[Sequence] = []
        draft_bytes, room = context.drafters.slot_bytes, settings.max_draft_tokens
        self.kv_budget = KVBudget.of(context.target, settings.kv_bytes, draft_bytes=draft_bytes, room=room)
        self.kv_budget.allocated = self._allocated
        context.bounded = self.kv_budget.limit is not None
        self.prefix_cache = PrefixCache(settings.prefix_bytes if context.bounded else 0)
        self.closed = False
        self._context = context
        self._max_active, self._max_requests = settings.max_active, settings.max_active + settings.max_queue
        self._waiting: list[EngineRequest] = []  # in the order of their turn
        self._preempted: dict[EngineRequest, Sequence] = {}
        self._unfinished: set[EngineRequest] = set()
        self._lock = threading.RLock()
        self._answer_seconds = ANSWER_SECONDS
        self._blocked_by: int | None = None  # the number of slots lent when nothing could be scheduled because of them

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do. While all that wait need slots that are lent, it has not."""
        if self.active or self._blocked_by is None or self._blocked_by != self.kv_budget.lent:
            return bool(self.active or self._preempted or len(self._waiting))
        return False

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits, not even for slots that are lent."""
        return not (self.active or self._preempted or len(self._waiting))

    @property
    def kv_slots(self) -> int:
        """KV slots reserved by the active sequences, and lent for other work."""
        return self.kv_budget.used(list(self.active))

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `OverloadedError` when the queue is full, `ContextLengthError` when the request can
        never fit into the key/value memory, and `ShuttingDownError` after the engine was closed.
        """
        self.kv_budget.check(request)
        with self._lock:
            if self.closed:
                raise ShuttingDownError("the engine is shutting down")
            if len(self._unfinished) >= self._max_requests:
                retry = max(1.0, self._answer_seconds * len(self._waiting) / self._max_active)
                raise OverloadedError(f"{len(self._waiting)} requests wait already", retry_after=round(retry, 1))
            self._unfinished.add(request)
            insort_right(self._waiting, request, key=priority_of)
            self._blocked_by = None
            self._context.counters.requests += 1

    def cancel(self, request: EngineRequest) -> bool:
        """Give a request's place in the queue to others now. Its work ends, and its KV slots are free, before the next
        step (`remove_cancelled`). Returns False if it has finished.
        """
        with self._lock:
            if request not in self._unfinished:
                return False
            request.cancelled = True
            self._blocked_by = None
            self._unfinished.discard(request)
            if request in self._waiting:
                self._waiting.remove(request)
            self._context.counters.cancelled += 1
            return True

    def schedule(self, open_sequence: Callable[[EngineRequest], Sequence | None]) -> Schedule:
        """Admit the requests that fit, reserve the KV slots that active sequences may need, and plan the next step.

        `open_sequence` starts a request with KV slots from `allocate` and returns None if that failed.
        """
        failed: list[tuple[Sequence, Exception]] = []
        while (request := self._next()) is not None:
            preempted = self._preempted.get(request)
            if preempted is None:
                if (sequence := open_sequence(request)) is not None:
                    self.active.append(sequence)
            elif (error := self._resume(preempted)) is not None:
                failed.append((preempted, error))
        self._reserve()
        self.prefix_cache.shrink(self.kv_budget.idle_bytes(self.active))
        return replace(Schedule.of(self.active, self._context), failed=failed)

    def _resume(self, sequence: Sequence) -> Exception | None:
        """Make a preempted sequence active again. Returns the error if that fails, and leaves it preempted."""
        try:
            sequence.kv_cache = self.allocate(sequence.request, sequence.tokens)
        except Exception as error:
            if is_device_error(error):
                raise
            return error
        del self._preempted[sequence.request]
        self.active.append(sequence)
        return None

    def _next(self) -> EngineRequest | None:
        """Return the next request if there is a slot and memory for it; else None."""
        with self._lock:
            lent = self.kv_budget.lent
            if not self._waiting:
                return None
            if not self._has_room(self._waiting[0]):
                self._blocked_by = None if self.active else lent
                return None
            return self._waiting.pop(0)

    def _has_room(self, request: EngineRequest) -> bool:
        preempted = self._preempted.get(request)
        slots = self.kv_budget.initial(request, None if preempted is None else len(preempted.tokens))
        return len(self.active) < self._max_active and self.kv_budget.fits(slots, self.active)

    def allocate(self, request: EngineRequest, tokens: list[int]) -> KVCache:
        """Return a KV cache with room for `tokens` and more. It reuses the longest cached prefix of `tokens`, but never
        the last token, which must be computed because its logits are needed.
        """
        capacity = self.kv_budget.initial(request, len(tokens))
        found = self.reusable(request.tenant, tokens[:-1], capacity, reserved_slots=capacity)
        if found is not None:
            self._context.counters.reused_tokens += found.length
        return found or self._context.target.new_cache(capacity)

    def reusable(self, tenant: str, tokens: list[int], capacity: int, reserved_slots: int = 0) -> SequenceCache | None:
        """The slots of the longest cached prefix; None if there are none, or no memory for a copy of them.

        Idle slots leave room for `reserved_slots` that the budget does not know of yet.
        """
        left = max(0, self.kv_budget.idle_bytes(self.active) - reserved_slots * self.kv_budget.slot_bytes)
        try:
            return self.prefix_cache.find(tenant, tokens, capacity, left)
        except Exception as error:
            if is_device_error(error):
                raise
            logger.warning("a prompt is computed again, since its slots cannot be copied: %s", error_location(error))
            self.prefix_cache.clear()
            return None

    def _reserve(self) -> None:
        """Reserve KV slots for every active sequence's part of the step; preempt the last ones if there are too few."""
        for sequence in sorted(self.active, key=precedence):
            while sequence in self.active and not self.kv_budget.grow(sequence, self.active):
                self._preempt(last_of(self.active))

    def _preempt(self, sequence: Sequence) -> None:
        """Take the sequence's KV slots and its place; it resumes later from its tokens."""
        self.active.remove(sequence)
        self._preempted[sequence.request] = sequence
        self._keep(sequence)
        sequence.rest()
        self._context.counters.preempted += 1
        with self._lock:
            if not sequence.request.cancelled:
                insort_left(self._waiting, sequence.request, key=priority_of)

    def remove(self, sequence: Sequence, *, clean: bool) -> None:
        """Remove a sequence. If it finished cleanly (`clean`), its KV slots are kept for later requests; else they are
        free, since the KV budget counts those of active sequences.
        """
        if self._preempted.pop(sequence.request, None) is None:
            self.active.remove(sequence)
        self.forget(sequence.request)
        sequence.close(clean=clean)
        if clean:
            self._keep(sequence)
            self._answer_seconds += 0.2 * (perf_counter() - sequence.started - self._answer_seconds)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence that failed, whatever state it is in."""
        self._preempted.pop(sequence.request, None)
        if sequence in self.active:
            self.active.remove(sequence)
        self.forget(sequence.request)
        try:
            sequence.close(clean=False)
        except Exception as error:
            logger.error("a failed answer was not closed: %s", error_location(error))

    def drop_running(self) -> list[EngineRequest]:
        """Drop all sequences of a step that failed as a whole, and return their requests. If none ran, drop those that
        wait, since the next step would fail like this one.
        """
        with self._lock:
            running = [request for request in self._unfinished if request not in self._waiting]
            if not running:
                running = [*self._waiting]
                self._waiting.clear()
        sequences = [*self.active, *(self._preempted[request] for request in running if request in self._preempted)]
        for sequence in sequences:
            self.drop(sequence)
        return [request for request in running if not request.cancelled]

    def remove_cancelled(self) -> None:
        """Remove the sequences whose requests were cancelled since the last step."""
        for sequence in [*self.active, *self._preempted.values()]:
            if sequence.request.cancelled:
                self.remove(sequence, clean=False)

    def forget(self, request: EngineRequest) -> None:
        """Stop tracking a request that has finished or never started."""
        with self._lock:
            self._unfinished.discard(request)

    def mark_forgotten(self, reach: Reach) -> None:
        """Keep nothing of the open requests that a deletion covers. Any thread may call this."""
        with self._lock:
            for request in self._unfinished:
                covered = reach.covers(request.tenant, request.original.labels.session, time.time())
                request.forgotten = request.forgotten or covered

    def share_prompt(self, sequence: Sequence) -> None:
        """Copy the prompt's KV slots into the prefix cache for the other choices of the same request."""
        sequence.request.shares_prompt = False
        self._keep(sequence, len(sequence.request.prompt))

    def _keep(self, sequence: Sequence, length: int | None = None) -> None:
        """Move the KV slots of a sequence that runs no more into the prefix cache; with `length`, copy those of its
        first tokens.
        """
        cache, request = sequence.kv_cache, sequence.request
        if request.original.store and not request.forgotten and isinstance(cache, SequenceCache):
            tokens = sequence.tokens[: cache.length if length is None else length]
            self.keep(request.tenant, tokens, cache, copy=length is not None, session=request.original.labels.session)

    def keep(self, tenant: str, tokens: list[int], cache: SequenceCache, **how: Any) -> None:
        """Move the slots of `tokens` from `cache` into the prefix cache, or copy them: see `PrefixCache.keep`."""
        try:
            left, how = self.kv_budget.idle_bytes(self.active), {"copy": False, **how}
            self.prefix_cache.keep(tenant, tokens, cache, left, **how)
        except Exception as error:  # no memory for the copy: the answer itself is not affected
            if is_device_error(error):
                raise
            logger.warning("the rows of an answer are not kept for the next call: %s", error_location(error))
            self.prefix_cache.clear()

    def keeps(self, tokens: int) -> bool:
        """Whether the slots of so many tokens could be kept if no others were; never those that cannot be counted."""
        taken = self.prefix_cache.takes(tokens * self.kv_budget.slot_bytes)
        return self._context.bounded and taken and self.kv_budget.fits(tokens, [])

    def lend(self, slots: int) -> Callable[[], None]:
        """Set KV slots aside for work outside the answers, for which idle ones make room. Only the computing thread may
        call this, and any thread the function returned, which gives them back. Raises as `KVBudget.lend`.
        """
        give_back = self.kv_budget.lend(slots, self.active)
        self.prefix_cache.shrink(self.kv_budget.idle_bytes(self.active))
        return give_back

    def _allocated(self) -> int:
        """Bytes of KV slots in use, as far as another thread can tell."""
        caches = [sequence.kv_cache for sequence in list(self.active)]
        running = sum(cache.nbytes for cache in caches if isinstance(cache, SequenceCache))
        return running + self.prefix_cache.nbytes

    def clear(self) -> list[EngineRequest]:
        """Close the scheduler, free everything and return the requests that were neither finished nor cancelled."""
        with self._lock:
            self.closed = True
            unfinished = [request for request in self._unfinished if not request.cancelled]
            self._waiting.clear()
            self._unfinished.clear()
        for sequence in [*self.active, *self._preempted.values()]:
            self.drop(sequence)
        self.prefix_cache.clear()
        LEDGER.release(self.kv_budget)
        return unfinished


def priority_of(request: EngineRequest) -> int:
    return request.priority


def precedence(sequence: Sequence) -> tuple[int, float]:
    """The sort key for keeping a place when memory is short: the lowest key keeps it, the highest is preempted."""
    return sequence.request.priority, sequence.started


def last_of(sequences: list[Sequence]) -> Sequence:
    return max(sequences, key=precedence)
