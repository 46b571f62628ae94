"""The discrete-event simulation: sessions arrive, the gateway places their calls, engines serve them."""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import exp, inf

from agentspec.benchmarks.placement.engine import SimulatedEngine
from agentspec.benchmarks.placement.report import Comparison, PolicyRun, SimulationCounts
from agentspec.benchmarks.placement.scenario import Order, Scenario
from agentspec.benchmarks.placement.workload import SessionShape, SimulatedSession, Stretch
from agentspec.errors import ConfigurationError
from agentspec.placement import POLICIES, Call, Member

Progress = Callable[[str], None]


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
