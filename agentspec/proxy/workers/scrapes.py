"""Collects the metrics of all processes in the parent, for the worker that was asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from agentspec.proxy.admission.concurrency import ConcurrencyLimiter
from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.workers.child import Child
from agentspec.telemetry.metrics import Metrics
from agentspec.telemetry.metrics_sum import MetricsSum, dump

ANSWER_SECONDS = 2.0  # then a process that does not answer counts with what it reported last
PARENT_METRICS = ("agentspec_tenant_", "agentspec_connections")


@dataclass(slots=True)
class _Scrape:
    """One question for the metrics: who asked under which number, and whose answers are still to come."""

    asker: Child
    number: int
    missing: set[str]
    timer: asyncio.TimerHandle | None = field(default=None)


class Scrapes:
    """Asks the processes for their metrics. What ended processes counted stays in the sums."""

    def __init__(self, version: str, limiter: ConcurrencyLimiter, connections: Connections) -> None:
        self._own = Metrics(version=version, tenants=limiter.samples)
        self._own.connections(lambda: (0, connections.ended))
        self._ended = MetricsSum()
        self._running: dict[int, _Scrape] = {}
        self._last: dict[str, tuple[Child, str]] = {}
        self._number = 0

    def begin(self, asker: Child, number: int, children: Iterable[Child]) -> None:
        """Ask the other `children`, and send the asker what all of them say."""
        self._number += 1
        key = self._number
        others = [child for child in children if child is not asker]
        scrape = self._running[key] = _Scrape(asker, number, {child.name for child in others})
        for child in others:
            child.send("collect", key)
        scrape.timer = asyncio.get_running_loop().call_later(ANSWER_SECONDS, self._finish, key)
        if not others:
            self._finish(key)

    def reported(self, child: Child, dumped: str, key: int | None = None) -> None:
        """Note what a process reports, by itself or as the answer to a question."""
        self._last[child.name] = (child, dumped)
        scrape = self._running.get(key or 0)
        if key is not None and scrape is not None:
            scrape.missing.discard(child.name)
            if not scrape.missing:
                self._finish(key)

    def ended(self, child: Child) -> None:
        """Keep what a process counted that has ended."""
        _, dumped = self._last.pop(child.name, (child, None))
        if dumped is not None:
            self._ended.add(dumped, ended=True)
        for key, scrape in list(self._running.items()):
            scrape.missing.discard(child.name)
            if scrape.asker is child:  # the next process of this name asks under the same numbers
                self._drop(key)
            elif not scrape.missing:
                self._finish(key)

    def _drop(self, key: int) -> _Scrape | None:
        scrape = self._running.pop(key, None)
        if scrape is not None and scrape.timer is not None:
            scrape.timer.cancel()
        return scrape

    def _finish(self, key: int) -> None:
        scrape = self._drop(key)
        if scrape is None:
            return
        dumps = [dumped for name, (_, dumped) in self._last.items() if name != scrape.asker.name]
        parent = dump(self._own.registry, only=PARENT_METRICS)
        scrape.asker.send("scraped", scrape.number, [parent, dump(self._ended), *dumps])
