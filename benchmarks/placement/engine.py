"""A simulated engine: continuous batching with chunked prefill, a queue, and a KV cache that keeps prefixes.

Between two events every step of an engine takes the same time, so that only the events are simulated: the end of a
prefill and the end of an answer. Sequences that decode advance by one token in every step, those with prefill too.
A prefill that arrives between steps starts at once instead of half a step later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from agentspec.benchmarks.placement.scenario import EngineCosts
from agentspec.benchmarks.placement.workload import SimulatedSession, Stretch

OnSession = Callable[[SimulatedSession, float], None]


class SimulatedPrefixCache:
    """Least recently used blocks go first, of one prompt the last ones, as in vLLM.

    A prompt is a path of stretches: those it shares with other sessions, then its session's own, which grows. All
    blocks of a stretch are used at the same times, so that evicting a stretch from its end is evicting blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pinned_tokens = 0
        self._idle_tokens = 0
        self._idle: OrderedDict[int, int] = OrderedDict()  # tokens by stretch, the least recently used first
        self._pinned: dict[int, list[int]] = {}  # tokens and users

    def begin(self, shared: Sequence[Stretch], own: int, keep: int, tokens: int) -> int | None:
        """Hold a prompt and its answer: `tokens` of the session's `own` stretch, whose first `keep` are as before.

        Returns how many tokens of the prompt were cached, or None, and holds nothing, if there is no room now.
        """
        hit, whole, missing = 0, True, 0
        for key, size in shared:
            cached = self._cached(key)
            hit += cached if whole else 0
            whole = whole and cached == size
            missing += size - cached
        cached = min(self._idle.get(own, 0), keep) if whole else 0
        held_idle = sum(self._idle.get(key, 0) for key, _ in shared) + self._idle.get(own, 0)
        if self.pinned_tokens + held_idle + missing + tokens - self._idle.get(own, 0) > self.capacity:
            return None
        for key, size in shared:
            self._pin(key, size)
        self._pin(own, tokens)
        self._evict()
        return hit + cached

    def end(self, shared: Sequence[Stretch], own: int) -> None:
        """The answer is written: what was held may be evicted from now on, the session's own end first."""
        self._release(own)
        for key, _ in reversed(shared):
            self._release(key)

    def _cached(self, key: int) -> int:
        pinned = self._pinned.get(key)
        return pinned[0] if pinned else self._idle.get(key, 0)

    def _pin(self, key: int, tokens: int) -> None:
        pinned = self._pinned.get(key)
        if pinned is not None:
            pinned[1] += 1
            return
        self._idle_tokens -= self._idle.pop(key, 0)
        self._pinned[key] = [tokens, 1]
        self.pinned_tokens += tokens

    def _release(self, key: int) -> None:
        pinned = self._pinned[key]
        pinned[1] -= 1
        if not pinned[1]:
            del self._pinned[key]
            self._idle[key] = pinned[0]
            self.pinned_tokens -= pinned[0]
            self._idle_tokens += pinned[0]

    def _evict(self) -> None:
        over = self.pinned_tokens + self._idle_tokens - self.capacity
        while over > 0:
            key, tokens = self._idle.popitem(last=False)
            if tokens > over:
                self._idle[key] = tokens - over
                self._idle.move_to_end(key, last=False)
            self._idle_tokens -= min(tokens, over)
            over -= tokens


class SimulatedEngine:
    """One engine, which takes waiting calls as they came, or the nearest deadline first if `by_deadline`. `streamed`
    and `finished` are called with a session and the time, for first tokens and last ones.

    `next_at` is when something happens in it next, which the caller then lets happen by `wake`;
    `followed_at` is the caller's note of what it has arranged.
    """

    def __init__(
        self,
        name: str,
        costs: EngineCosts,
        streamed: OnSession,
        finished: OnSession,
        *,
        by_deadline: bool = False,
    ) -> None:
        self.name, self.costs, self._by_deadline = name, costs, by_deadline
        self.waiting: list[tuple[float, int, SimulatedSession]] = []  # a heap
        self.cache = SimulatedPrefixCache(costs.kv_tokens)
        self.next_at = self.followed_at = inf
        self._streamed, self._finished = streamed, finished
        self._decoding: list[tuple[float, int, SimulatedSession]] = []  # by the step at which they end
        self._reading: list[SimulatedSession] = []
        self._held: SimulatedSession | None = None  # the next in turn, which finds no room
        self._context = 0
        self._steps = 0.0
        self._until = inf  # the step at which something happens next
        self._read_until = 0.0
        self._read_tokens = 0.0  # of prompts, in each step of the prefill
        self._step_seconds = costs.step
        self._at = 0.0

    @property
    def kv_use(self) -> float:
        return self.cache.pinned_tokens / self.cache.capacity

    @property
    def calls(self) -> int:
        """Those under way, and those that wait."""
        return len(self._decoding) + len(self._reading) + self.queued

    @property
    def queued(self) -> int:
        return len(self.waiting) + (self._held is not None)

    def submit(self, session: SimulatedSession, now: float) -> None:
        """Put a call in the queue, and start it if the engine reads no other prompt now."""
        heappush(self.waiting, (session.deadline if self._by_deadline else now, session.number, session))
        if not self._reading:
            self._advance(now)
            self._schedule(now)

    def wake(self, now: float) -> None:
        """Let happen what is due at `next_at`."""
        self._at = now
        self._steps = self._until  # exactly, or rounding could leave a part of a step that no time is long enough for
        decoding = self._decoding
        ended = []
        while decoding and decoding[0][0] <= self._steps:
            ended.append(heappop(decoding)[2])
        for session in ended:
            self._end(session, now)
        if self._reading and self._steps >= self._read_until:
            self._start_decoding(now)
        self._schedule(now)

    def _advance(self, now: float) -> None:
        if self._reading or self._decoding:
            self._steps += (now - self._at) / self._step_seconds
        self._at = now

    def _schedule(self, now: float) -> None:
        """Begin to read prompts if there are any, and find out when the next thing happens."""
        if not self._reading and (self._held is not None or self.waiting):
            self._start_reading(now)
        costs = self.costs
        seconds = costs.step + len(self._decoding) * costs.sequence + self._context * costs.context_token
        until = self._decoding[0][0] if self._decoding else inf
        if self._reading:
            seconds += self._read_tokens * costs.prompt_token
            until = min(until, self._read_until)
        self._step_seconds, self._until = seconds, max(until, self._steps)
        self.next_at = now + (self._until - self._steps) * seconds

    def _start_reading(self, now: float) -> None:
        """Take calls in turn until their prompts fill a step. If the next one finds no room, none overtakes it."""
        total, budget = 0, self.costs.max_batched_tokens
        while total < budget and len(self._decoding) + len(self._reading) < self.costs.max_running:
            session = self._held or (heappop(self.waiting)[2] if self.waiting else None)
            if session is None:
                break
            if not self._admit(session, now):
                self._held = session
                break
            self._held = None
            self._reading.append(session)
            total += session.work
        if self._reading:
            steps = -(-total // budget)
            self._read_until, self._read_tokens = self._steps + steps, total / steps

    def _admit(self, session: SimulatedSession, now: float) -> bool:
        shape = session.shape
        hit = self.cache.begin(shape.shared, session.own, session.keep, session.tokens)
        if hit is None:
            return False
        prompt = shape.shared_tokens + session.call.prompt
        whole = hit - hit % self.costs.block_tokens
        session.hit = min(whole, prompt - 1)  # the last token is always computed
        session.work = prompt - session.hit
        session.started = now
        return True

    def _start_decoding(self, now: float) -> None:
        """The prompts are read, and with the same steps the first token of each answer is written."""
        begun, self._reading = self._reading, []
        for session in begun:
            self._streamed(session, now)
            self._context += session.shape.shared_tokens + session.tokens
            if session.answer > 1:
                heappush(self._decoding, (self._steps + session.answer - 1, session.number, session))
            else:
                self._end(session, now)

    def _end(self, session: SimulatedSession, now: float) -> None:
        self._context -= session.shape.shared_tokens + session.tokens
        self.cache.end(session.shape.shared, session.own)
        self._finished(session, now)
