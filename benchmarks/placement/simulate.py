"""The discrete-event simulation: sessions arrive, the gateway places their calls, engines serve them and die."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import exp, inf

from agentspec.benchmarks.placement.counts import SimulationCounts
from agentspec.benchmarks.placement.engine import SimulatedEngine
from agentspec.benchmarks.placement.gateway import SimulatedGateway
from agentspec.benchmarks.placement.prefix_cache import Stretch
from agentspec.benchmarks.placement.scenario import Scenario
from agentspec.benchmarks.placement.session import SimulatedSession
from agentspec.benchmarks.placement.workload import SessionShape


class Simulation:
    """One run of a scenario over recorded shapes, which are drawn with replacement. `run` can be called once."""

    def __init__(self, scenario: Scenario, shapes: Sequence[SessionShape]) -> None:
        scenario.require_room(shapes)
        self._scenario, self._shapes = scenario, shapes
        self.counts = SimulationCounts(int(scenario.sessions * scenario.warm_up), scenario.costs.block_tokens)
        # Drawn in order of arrival, so that every policy sees the same sessions with the same pauses.
        self._draws = random.Random(scenario.seed)
        self._deaths = random.Random(scenario.seed + 1)
        self._balancer = random.Random(scenario.seed + 2)
        self._engines = {name: self._engine(name) for name in map("engine-{}".format, range(scenario.engines))}
        self._gateways = [SimulatedGateway(scenario.policy, self._engines) for _ in range(scenario.gateways)]
        self._scraped = dict.fromkeys(self._engines, -inf)
        self._shared_blocks = _shared_blocks(shapes, scenario.block_tokens)
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._dead: set[str] = set()
        self._number = 0
        self._came = self._open = 0

    def run(self) -> SimulationCounts:
        """Simulate until the last session is over."""
        events, counts = self._events, self.counts
        self._at(self._draws.expovariate(self._scenario.rate), self._arrive, None)
        if self._scenario.kill_every:
            self._at(self._scenario.kill_every, self._kill, None)
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
        """The session makes its next call, or the same one again."""
        shape = session.shape
        session.begin(now, self._scenario.block_tokens, self._shared_blocks[shape.shared])
        self._place(now, session)

    def _place(self, now: float, session: SimulatedSession) -> None:
        number, before = self._balancer.randrange(len(self._gateways)), session.member
        session.member = self._gateways[number].place(session.placement())
        if before and not session.known_to >> number & 1:
            self.counts.handed_over += 1
            self.counts.agreed += session.member == before
        session.gateway = number
        session.known_to |= 1 << number
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
            self._close(session)

    def _close(self, session: SimulatedSession) -> None:
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
        self._gateways[session.gateway].count(engine.name, change)
        if now - self._scraped[engine.name] >= self._scenario.scrape:
            self._scraped[engine.name] = now
            for gateway in self._gateways:
                gateway.scrape(engine)

    def _kill(self, now: float, _: object) -> None:
        """One engine dies: what has begun to stream is cut short, and its client asks again; all else is retried."""
        scenario = self._scenario
        victim = self._engines[self._deaths.choice([name for name in self._engines if name not in self._dead])]
        self._dead.add(victim.name)
        for gateway in self._gateways:
            gateway.lost(victim.name)
        victim.next_at = inf
        self.counts.deaths += 1
        for session in victim.abandoned():
            self._rescue(now, session)
        self._at(now + scenario.restart, self._restart, victim.name)
        self._at(now + scenario.kill_every, self._kill, None)

    def _rescue(self, now: float, session: SimulatedSession) -> None:
        scenario, counts = self._scenario, self.counts
        if session.streamed:
            counts.cut += 1
            self._at(now + scenario.detect, self._send, session)
        elif session.tries < scenario.retries:
            session.tries += 1
            counts.retried += 1
            self._at(now + scenario.detect, self._place, session)
        else:
            counts.lost += 1
            self._close(session)

    def _restart(self, now: float, name: str) -> None:
        self._engines[name] = self._engine(name)
        self._dead.remove(name)
        self._scraped[name] = -inf
        for gateway in self._gateways:
            gateway.found(name)


def _shared_blocks(shapes: Sequence[SessionShape], block_tokens: int) -> dict[tuple[Stretch, ...], list[int]]:
    """Hashes of the blocks that sessions share: a block that ends in a stretch is the same wherever that stretch is."""
    blocks = {}
    for shared in {shape.shared for shape in shapes}:
        ends = list(accumulate(tokens for _, tokens in shared))
        places = range(ends[-1] // block_tokens if ends else 0)
        inside = [bisect_left(ends, (place + 1) * block_tokens) for place in places]
        blocks[shared] = [-1 - abs(hash((shared[at][0], place))) for place, at in zip(places, inside, strict=True)]
    return blocks
