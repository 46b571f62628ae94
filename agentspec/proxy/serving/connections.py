"""Bounds on a server's connections: how many, how slow, and how long they may wait for nothing."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from agentspec.errors import SlowClientError
from agentspec.proxy.logs import logger
from agentspec.proxy.serving.protocol import BoundedConnection, Phase
from agentspec.settings.server import ServerSettings

CROWDED = 0.75  # of the connections that may be open
HURRY = 0.1  # of `header_timeout` is left to connections without a request while it is crowded


@dataclass(slots=True)
class Observed:
    """What a connection did when it was looked at last. Times are in seconds by the loop's clock."""

    phase: Phase = Phase.HEAD
    cycle: Any = None
    since: float = 0.0  # in this phase of this request
    answering_since: float = 0.0
    received: int = 0  # bytes, at `window`
    window: float = 0.0
    unsent: int = 0  # bytes
    sent: float = 0.0  # when the client last took something, or nothing waited for it


class Connections:
    """Admits connections up to the limits, and ends those that are over a time limit each time `sweep` is called.

    Looking at all of them a few times a second costs less than timers that every request would set and cancel. It is
    crowded above a part of `capacity` divided by `processes`, where several share it.
    """

    def __init__(self, settings: ServerSettings, capacity: int, *, processes: int = 1) -> None:
        self.settings = settings
        self._capacity = capacity
        self._crowded_above = capacity * CROWDED / processes
        self.open = 0
        self._by_network: Counter[str] = Counter()
        self._observed: dict[BoundedConnection, Observed] = {}
        self.ended: Counter[str] = Counter()
        self._logged: Counter[str] = Counter()

    def admit(self, address: str) -> str | None:
        """Count a connection from `address`; returns what `release` takes, None if there are too many."""
        network = _network(address)
        if self.open >= self._capacity or self._by_network[network] >= self.settings.max_connections_per_address:
            self.ended["refused"] += 1
            return None
        self._by_network[network] += 1
        self.open += 1
        return network

    def release(self, network: str) -> None:
        self.open -= 1
        self._by_network[network] -= 1
        if not self._by_network[network]:
            del self._by_network[network]

    @property
    def shortest(self) -> float:
        """The shortest of the time limits, in seconds."""
        settings = self.settings
        return min(settings.header_timeout, settings.body_rate_window, settings.write_timeout)

    def sweep(self, connections: Iterable[BoundedConnection], now: float) -> None:
        """Look at all open connections, end those that are too slow, and log how many."""
        self._observed = {one: self._observed.get(one) or Observed(since=now, sent=now) for one in connections}
        for connection, observed in self._observed.items():
            _observe(connection, observed, now)
            self._check(connection, observed, now)
        if ended := self.ended - self._logged:
            logger.warning("connections ended", open=self.open, **ended)
            self._logged = self.ended.copy()

    def _check(self, connection: BoundedConnection, observed: Observed, now: float) -> None:
        if now - observed.sent > self.settings.write_timeout or self._answers_too_long(connection, observed, now):
            self.ended["write_timeout"] += 1
            connection.transport.abort()
        elif connection.transport.is_closing():
            return
        elif observed.phase is Phase.HEAD and now - observed.since > self._patience:
            self.ended["header_timeout"] += 1
            self._end_head(connection, observed)
        elif observed.phase is Phase.IDLE and self._is_crowded and now - observed.since > self._patience:
            self.ended["crowded"] += 1
            connection.transport.close()
        elif observed.phase is Phase.BODY and now - observed.window > self.settings.body_rate_window:
            self._check_rate(connection, observed, now)

    @property
    def _is_crowded(self) -> bool:
        return self.open > self._crowded_above

    @property
    def _patience(self) -> float:
        """Seconds that a connection may wait for a head: fewer where waiting ones leave no room for others."""
        return self.settings.header_timeout * (HURRY if self._is_crowded else 1)

    def _answers_too_long(self, connection: BoundedConnection, observed: Observed, now: float) -> bool:
        """Whether the client still has not taken an answer whose time is over: nobody can tell it so."""
        late = now - observed.answering_since > self.settings.request_timeout
        return late and observed.phase is Phase.ANSWER and connection.flow.write_paused

    def _end_head(self, connection: BoundedConnection, observed: Observed) -> None:
        if connection.received == observed.received:  # a client that connected ahead of need expects no answer
            connection.transport.close()
        else:
            seconds = self._patience
            connection.refuse(SlowClientError(f"no complete head within {seconds:g} seconds (server.header_timeout)"))

    def _check_rate(self, connection: BoundedConnection, observed: Observed, now: float) -> None:
        rate = (connection.received - observed.received) / (now - observed.window)
        observed.window, observed.received = now, connection.received
        if rate < self.settings.min_body_rate and not connection.flow.read_paused:
            self.ended["body_rate"] += 1
            least = f"{self.settings.min_body_rate} bytes a second (server.min_body_rate)"
            connection.refuse(SlowClientError(f"the body arrives too slowly: send at least {least}"))


def _observe(connection: BoundedConnection, observed: Observed, now: float) -> None:
    """Note what changed since the last look."""
    phase, unsent = connection.phase, connection.unsent
    if phase is not observed.phase or connection.cycle is not observed.cycle:
        if connection.cycle is not observed.cycle:
            observed.answering_since = now
        observed.phase, observed.cycle, observed.since = phase, connection.cycle, now
        observed.window, observed.received = now, connection.received
    if unsent == 0 or unsent < observed.unsent:
        observed.sent = now
    observed.unsent = unsent


def _network(address: str) -> str:
    """The address as one client has it: of IPv6 the /64, since a client may use all addresses in it."""
    if ":" not in address:
        return address
    six = ipaddress.IPv6Address(address.partition("%")[0])
    return str(six.ipv4_mapped or ipaddress.IPv6Address(int(six) >> 64 << 64))
