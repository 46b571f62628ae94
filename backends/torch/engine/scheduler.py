"""The scheduler decides which requests wait, which sequences are active and how many tokens each computes in a step."""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from traceback import clear_frames
from typing import TYPE_CHECKING

from torch import Tensor

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine.device_memory import budget_of, release
from agentspec.backends.torch.engine.prefix_cache import PrefixCache
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest, Sequence
from agentspec.backends.torch.engine.speculator import NOTHING, Proposal, StepEstimate
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import is_device_error
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.cache.deletion import Reach
from agentspec.errors import ShuttingDownError
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import Delta

if TYPE_CHECKING:
    from agentspec.backends.torch.engine.prefill import Guesses

logger = logging.getLogger(__name__)


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

    def propose(self) -> None:
        self.proposal = self.sequence.propose()

    def begin(self) -> None:
        assert self.logits is not None
        self.sequence.begin(self.proposal, self.logits)

    def commit(self, cost: StepEstimate) -> Delta | None:
        if not self.draws:
            self.sequence.commit_chunk(self.num_tokens)
            return None
        return self.sequence.commit(self.num_tokens, self.proposal, cost)


def plan_step(active: Iterable[Sequence], context: EngineContext) -> list[ScheduledSequence]:
    """The sequences that decode first, then prompt chunks in order, within the step's token budget."""
    ready = list(active)
    scheduled = [ScheduledSequence(sequence, 1, draws=True) for sequence in ready if sequence.num_uncomputed == 1]
    budget = context.governor.chunk(len(scheduled), kv_length(scheduled))
    for sequence in ready:
        uncomputed = sequence.num_uncomputed
        if uncomputed > 1 and budget > 0:
            tokens = min(uncomputed, budget)
            scheduled.append(ScheduledSequence(sequence, tokens, draws=tokens == uncomputed))
            budget -= tokens
    return scheduled


def kv_length(scheduled: Iterable[ScheduledSequence]) -> int:
    """The number of committed KV slots that the tokens of a step attend to."""
    return sum(each.sequence.kv_cache.length for each in scheduled)


class Scheduler:
    """Owns the queue, the key/value memory and the chunking of prompts.

    At most `max_active` sequences are computed. Of the requests that wait, the ones with a lower priority number go
    first, and among equals those that came first; the first one begins once all slots that it may need are free, so
    that what runs always ends. While nothing runs or waits, an expected prompt (of `guesses`) is read, which pauses for
    any other work. Without `keeps_prefixes` no slots are stored from one request to the next.
    Any thread may call `add`, `cancel` and `mark_forgotten` and read the counts; all else belongs to the computing
    thread.
    """

    def __init__(self, context: EngineContext, settings: TorchSettings, *, keeps_prefixes: bool = True) -> None:
        self.active: list[Sequence] = []
        draft_bytes = 0 if context.draft_model is None else context.draft_model.model.slot_bytes()
        room = settings.max_draft_tokens
        self.kv_budget = budget_of(context.target, settings.kv_bytes, draft_bytes=draft_bytes, room=room)
        self.kv_budget.allocated = self._allocated
        self.prefix_cache = PrefixCache()
        self.closed = False
        self._context = context
        self._max_active, self.keeps_prefixes = settings.max_active, keeps_prefixes
        self._waiting: list[EngineRequest] = []  # the next one first
        self.guesses: Guesses | None = None  # of the prompts that are expected, once there are any
        self.deletions = 0  # calls of `mark_forgotten`
        self._unfinished: set[EngineRequest] = set()
        self.lock = threading.RLock()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do. While the next request needs slots that are lent, it has not."""
        with self.lock:
            if self.active and not self.active[0].request.guess:
                return True
            return bool(self._waiting) and (bool(self.active) or self.has_room(self._waiting[0]))

    @property
    def has_guess(self) -> bool:
        """Whether an expected prompt can be read now."""
        with self.lock:
            return self.guesses is not None and not self._waiting and (bool(self.active) or self.guesses.startable)

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits, not even for slots that are lent."""
        return not (self.active or self._waiting)

    @property
    def kv_slots(self) -> int:
        """KV slots reserved by the active sequences, and lent for other work."""
        return self.kv_budget.used(list(self.active))

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `ContextLengthError` when the request can never fit into the key/value memory, and
        `ShuttingDownError` after the engine was closed.
        """
        self.kv_budget.check(request)
        with self.lock:
            if self.closed:
                raise ShuttingDownError("the engine is shutting down")
            self._unfinished.add(request)
            insort_right(self._waiting, request, key=lambda one: one.original.priority)
            self._context.counters.requests += 1
            if self.guesses is not None:
                self.guesses.drop(request)

    def cancel(self, request: EngineRequest) -> bool:
        """Give a request's place in the queue to others now. Its work ends, and its KV slots are free, before the next
        step (`remove_cancelled`). Returns False if it has finished.
        """
        with self.lock:
            if request not in self._unfinished:
                return False
            request.cancelled = True
            self._unfinished.discard(request)
            if request in self._waiting:
                self._waiting.remove(request)
            self._context.counters.cancelled += 1
            return True

    def schedule(self, start: Callable[[EngineRequest], Sequence | None]) -> list[ScheduledSequence]:
        """Admit the requests that fit, and plan the next step. `start` opens the sequence of a request, with KV slots
        from `allocate`; it returns None if that failed.
        """
        if self._waiting and self.guesses is not None:
            self.guesses.pause()
        while (request := self._next()) is not None:
            if (sequence := start(request)) is not None:
                self.active.append(sequence)
        self.prefix_cache.shrink(self.kv_budget.idle_bytes(self.active))
        reading = None if self.guesses is None else self.guesses.step()
        return plan_step(self.active, self._context) if reading is None else [reading]

    def _next(self) -> EngineRequest | None:
        """Return the next request if there is a slot and memory for it; else None."""
        with self.lock:
            if self._waiting:
                return self._waiting.pop(0) if self.has_room(self._waiting[0]) else None
            guess = None if self.guesses is None else self.guesses.next()
            if guess is not None:
                self._unfinished.add(guess)
            return guess

    def has_room(self, request: EngineRequest) -> bool:
        """Whether a request may begin now."""
        slots = self.kv_budget.needed(request)
        return len(self.active) < self._max_active and self.kv_budget.fits(slots, self.active)

    def allocate(self, request: EngineRequest) -> SequenceCache:
        """Return a KV cache with all slots that the request may need. It reuses the longest cached prefix of the
        prompt, but never the last token, which must be computed because its logits are needed.
        """
        capacity = self.kv_budget.needed(request)
        left = max(0, self.kv_budget.idle_bytes(self.active) - capacity * self.kv_budget.slot_bytes)
        try:
            found = self.prefix_cache.find(request.tenant, request.prompt[:-1], capacity, left)
        except Exception as error:  # no memory for a copy
            if is_device_error(error):
                raise
            logger.warning("a prompt is computed again, since its slots cannot be copied: %s", error_location(error))
            self.prefix_cache.clear()
            found = None
        if found is not None and not request.guess and self.guesses is not None:
            self.guesses.claim(request)
        return found or self._context.target.new_cache(capacity)

    def remove(self, sequence: Sequence, *, clean: bool) -> None:
        """Remove a sequence, whatever state it is in. If it finished cleanly (`clean`), its KV slots are stored for
        later requests; else they are free, since the KV budget counts those of active sequences.
        """
        if sequence in self.active:
            self.active.remove(sequence)
        self.forget(sequence.request)
        if self.guesses is not None and sequence.request.guess:
            self.guesses.count(sequence)
        try:
            sequence.close(clean=clean)
        except Exception as error:
            logger.error("an answer was not closed: %s", error_location(error))
        if clean:
            self.keep(sequence)

    def drop_running(self) -> list[EngineRequest]:
        """Drop all sequences of a step that failed as a whole, and return their requests. If none ran, drop those that
        wait, since the next step would fail like this one.
        """
        with self.lock:
            running = [request for request in self._unfinished if request not in self._waiting]
            if not running:
                running = [*self._waiting]
                self._waiting.clear()
        for sequence in [*self.active]:
            self.remove(sequence, clean=False)
        return [request for request in running if not request.cancelled]

    def remove_cancelled(self) -> None:
        """Remove the sequences whose requests were cancelled since the last step."""
        for sequence in [*self.active]:
            if sequence.request.cancelled:
                self.remove(sequence, clean=False)

    def forget(self, request: EngineRequest) -> None:
        """Stop tracking a request that has finished or never started."""
        with self.lock:
            self._unfinished.discard(request)

    def mark_forgotten(self, reach: Reach) -> None:
        """Keep nothing of the open requests that a deletion covers. Any thread may call this."""
        with self.lock:
            self.deletions += 1
            if self.guesses is not None:
                self.guesses.forget(reach)
            for request in self._unfinished:
                session = request.original.labels.session
                covered = reach.covers(request.tenant, session, time.time())  # a guess may derive from any text
                request.forgotten |= covered or (request.guess and reach.concerns(request.tenant))

    def keep(self, sequence: Sequence, length: int | None = None) -> None:
        """Move the KV slots of a sequence that runs no more into the prefix cache; with `length`, copy those of its
        first tokens.
        """
        cache, request = sequence.kv_cache, sequence.request
        if not self.keeps_prefixes or not request.original.store or request.forgotten:
            return
        tokens = sequence.tokens[: cache.length if length is None else length]
        left = self.kv_budget.idle_bytes(self.active)
        session, copy = request.original.labels.session, length is not None
        try:
            self.prefix_cache.keep(
                request.tenant, tokens, cache, left, copy=copy, session=session, guessed=request.guess
            )
        except Exception as error:  # no memory for the copy: the answer itself is not affected
            if is_device_error(error):
                raise
            logger.warning("the slots of an answer are not stored for the next call: %s", error_location(error))
            self.prefix_cache.clear()

    def _allocated(self) -> int:
        """Bytes of KV slots in use, as far as another thread can tell."""
        return self.prefix_cache.nbytes + sum(sequence.kv_cache.nbytes for sequence in list(self.active))

    def clear(self) -> list[EngineRequest]:
        """Close the scheduler, free everything and return the requests that were neither finished nor cancelled."""
        with self.lock:
            self.closed = True
            unfinished = [request for request in self._unfinished if not request.cancelled]
            self._waiting.clear()
            self.guesses = None
            self._unfinished.clear()
        for sequence in [*self.active]:
            self.remove(sequence, clean=False)
        self.prefix_cache.clear()
        release(self.kv_budget)
        return unfinished
