"""The discrete-event simulation: sessions arrive, the gateway places their calls, engines serve them.

A simulated engine has continuous batching with chunked prefill, a queue, and a KV cache that keeps prefixes. Between
two events every step of it takes the same time, so that only the events are simulated: the end of a prefill and the
end of an answer. Sequences that decode advance by one token in every step, those with prefill too. A prefill that
arrives between steps starts at once instead of half a step later.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import exp, inf

from agentspec.benchmarks.placement.report import Comparison, PolicyRun, SimulationCounts
from agentspec.benchmarks.placement.scenario import EngineCosts, Order, Scenario
from agentspec.benchmarks.placement.workload import SessionShape, SimulatedSession, Stretch
from agentspec.benchmarks.report import Progress
from agentspec.errors import ConfigurationError
from agentspec.placement import POLICIES, Call, Member

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


class SimulatedGateway:
    """Counts its calls to each engine, and sees what the engines' metrics say. It decides where a call goes."""

    def __init__(self, policy: str, engines: Iterable[str]) -> None:
        self._policy = POLICIES[policy]()
        self._members = {name: Member(name) for name in engines}
        self._in_flight = dict.fromkeys(self._members, 0)
        self._metrics: dict[str, tuple[int, int, float]] = dict.fromkeys(self._in_flight, (0, 0, 0.0))

    def place(self, call: Call) -> str:
        """The engine that takes `call`."""
        member = self._policy.choose(call, list(self._members.values()))
        self._policy.placed(call, member)
        return member.name

    def count(self, name: str, change: int) -> None:
        """So many more of its own calls are under way at the engine."""
        self._in_flight[name] += change
        self._update(name)

    def scrape(self, engine: SimulatedEngine) -> None:
        """Read the engine's metrics."""
        name = engine.name
        others = max(0, engine.calls - self._in_flight[name])
        self._metrics[name] = others, engine.queued, engine.kv_use
        self._update(name)

    def _update(self, name: str) -> None:
        self._members[name] = Member(name, self._in_flight[name], *self._metrics[name])


class Simulation:
    """One run of a scenario over recorded shapes, which are drawn with replacement. `run` can be called once."""

    def __init__(self, scenario: Scenario, shapes: Sequence[SessionShape]) -> None:
        require_room(scenario, shapes)
        self._scenario, self._shapes = scenario, shapes
        self.counts = SimulationCounts(int(scenario.sessions * scenario.warm_up), scenario.costs.block_tokens)
        # Drawn in order of arrival, so that every policy sees the same sessions with the same pauses.
        self._draws = random.Random(scenario.seed)
        self._engines = {name: self._engine(name) for name in map("engine-{}".format, range(scenario.engines))}
        self._gateway = SimulatedGateway(scenario.policy, self._engines)
        self._scraped = dict.fromkeys(self._engines, -inf)
        self._shared_blocks = _shared_blocks(shapes, scenario.block_tokens)
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._number = 0
        self._came = self._open = 0

    def run(self) -> SimulationCounts:
        """Simulate until the last session is over."""
        events, counts = self._events, self.counts
        self._at(self._draws.expovariate(self._scenario.rate), self._arrive, None)
        while self._open or self._came < self._scenario.sessions:
            now, _, happens, about = heappop(events)
            counts.events += 1
            counts.seconds = now
            happens(now, about)
        return counts

    def _at(self, when: float, happens: Callable[..., None], about: object) -> None:
        self._number += 1
        heappush(self._events, (when, self._number, happens, about))

    # Sessions.

    def _arrive(self, now: float, _: object) -> None:
        scenario, draws = self._scenario, self._draws
        shape = draws.choice(self._shapes)
        session = SimulatedSession(self._came, shape, now, self._pauses(shape))
        factor = draws.uniform(scenario.deadline_low, scenario.deadline_high)
        if draws.random() < scenario.deadline_share:
            session.deadline = now + factor * session.alone(scenario.costs)
        self._came += 1
        self._open += 1
        self._send(now, session)
        if self._came < scenario.sessions:
            self._at(now + draws.expovariate(scenario.rate), self._arrive, None)

    def _pauses(self, shape: SessionShape) -> list[float]:
        """The pause before each call but the first, as recorded or drawn."""
        draw, median, spread = self._draws.gauss, self._scenario.pause, self._scenario.pause_spread
        return [median * exp(draw(0, spread)) if call.pause is None else call.pause for call in shape.calls[1:]]

    def _send(self, now: float, session: SimulatedSession) -> None:
        """The session makes its next call."""
        shape = session.shape
        session.begin(now, self._scenario.block_tokens, self._shared_blocks[shape.shared])
        session.member = self._gateway.place(session.placement())
        engine = self._engines[session.member]
        engine.submit(session, now)
        self._count(engine, session, 1, now)
        self._follow(engine)

    def _streamed(self, session: SimulatedSession, now: float) -> None:
        self.counts.first_token(session, now)

    def _finished(self, session: SimulatedSession, now: float) -> None:
        self._count(self._engines[session.member], session, -1, now)
        session.waited += session.started - session.sent
        session.position += 1
        if session.position < len(session.shape.calls):
            self._at(now + session.pauses[session.position - 1], self._send, session)
        else:
            self.counts.closed(session, now)
            self._open -= 1

    # Engines.

    def _engine(self, name: str) -> SimulatedEngine:
        by_deadline = self._scenario.order == "deadline"
        return SimulatedEngine(name, self._scenario.costs, self._streamed, self._finished, by_deadline=by_deadline)

    def _follow(self, engine: SimulatedEngine) -> None:
        """See to it that the engine is woken when something happens in it next."""
        if engine.next_at != engine.followed_at and engine.next_at < inf:
            engine.followed_at = engine.next_at
            self._at(engine.next_at, self._wake, engine)

    def _wake(self, now: float, engine: SimulatedEngine) -> None:
        if now == engine.next_at:  # else something else has happened in it since
            engine.followed_at = inf
            engine.wake(now)
            self._follow(engine)

    def _count(self, engine: SimulatedEngine, session: SimulatedSession, change: int, now: float) -> None:
        """A call has gone to the engine, or has ended there. What its metrics say is seldom asked."""
        self._gateway.count(engine.name, change)
        if now - self._scraped[engine.name] >= self._scenario.scrape:
            self._scraped[engine.name] = now
            self._gateway.scrape(engine)


def require_room(scenario: Scenario, shapes: Sequence[SessionShape]) -> None:
    """Raise `ConfigurationError` for a call that no engine can hold."""
    longest, room = max(shape.longest for shape in shapes), scenario.costs.kv_tokens
    if longest > room:
        raise ConfigurationError(
            f"a call of {longest} tokens fits into no engine: kv_tokens is {room}; "
            "give engines with more room by costs.kv_tokens, or leave the recording out"
        )


def _shared_blocks(shapes: Sequence[SessionShape], block_tokens: int) -> dict[tuple[Stretch, ...], list[int]]:
    """Hashes of the blocks that sessions share: a block that ends in a stretch is the same wherever that stretch is."""
    blocks = {}
    for shared in {shape.shared for shape in shapes}:
        ends = list(accumulate(tokens for _, tokens in shared))
        places = range(ends[-1] // block_tokens if ends else 0)
        inside = [bisect_left(ends, (place + 1) * block_tokens) for place in places]
        blocks[shared] = [-1 - abs(hash((shared[at][0], place))) for place, at in zip(places, inside, strict=True)]
    return blocks


def compare(
    scenario: Scenario,
    shapes: Sequence[SessionShape],
    variants: Sequence[tuple[str, Order]],
    seeds: int,
    progress: Progress,
) -> Comparison:
    """Simulate each of `variants` with seeds from that of `scenario` on; every variant sees the same sessions."""
    compared = [PolicyRun(policy, order) for policy, order in variants]
    events, began = 0, time.process_time()
    for seed in range(scenario.seed, scenario.seed + seeds):
        for variant in compared:
            progress(f"{variant.policy}, {variant.order}, seed {seed}")
            change = {"policy": variant.policy, "order": variant.order, "seed": seed}
            counts = Simulation(scenario.model_copy(update=change), shapes).run()
            variant.figures.append(counts.figures())
            events += counts.events
    return Comparison(scenario, seeds, compared, events, time.process_time() - began)
