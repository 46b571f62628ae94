"""A simulated gateway: what it knows of the engines, and where it sends a call."""

from __future__ import annotations

from collections.abc import Iterable

from agentspec.benchmarks.placement.engine import SimulatedEngine
from agentspec.placement import POLICIES, Call, Member


class SimulatedGateway:
    """Counts its own calls to each engine, and sees those of other gateways in the engines' metrics alone."""

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

    def lost(self, name: str) -> None:
        """The engine has died."""
        del self._members[name]
        self._policy.removed(name)

    def found(self, name: str) -> None:
        """The engine is back, with an empty cache."""
        self._in_flight[name] = 0
        self._metrics[name] = (0, 0, 0.0)
        self._members[name] = Member(name)

    def _update(self, name: str) -> None:
        self._members[name] = Member(name, 1.0, self._in_flight[name], *self._metrics[name])
