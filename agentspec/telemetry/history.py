"""The last half hour of a gateway, from the metrics that it counts anyway: rates between two readings of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
from prometheus_client import CollectorRegistry

from agentspec.telemetry.safe_errors import error_location

_log = logging.getLogger(__name__)

EVERY = 10.0  # seconds between two points
POINTS = 180
FRESH = 1.0  # seconds that a reading serves all who ask for the newest

_OF_MODELS = ("prompt_tokens_total", "completion_tokens_total", "verify_steps_total")
_READ: dict[str, tuple[str, ...]] = {
    "requests_total": ("model", "outcome"),
    **dict.fromkeys((*_OF_MODELS, "draft_tokens_total", "accepted_tokens_total"), ("model",)),
    **dict.fromkeys(("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"), ("model",)),
    **dict.fromkeys(("engine_draft_tokens_total", "engine_accepted_tokens_total"), ("source",)),
    **dict.fromkeys(("engine_queued", "engine_active", "tenant_running", "tenant_waiting", "index_bytes"), ()),
    "process_resident_memory_bytes": (),
    "member_state": ("backend", "member", "state"),
    **dict.fromkeys(("member_in_flight", "member_calls_total", "member_failures_total"), ("backend", "member")),
    **dict.fromkeys(("member_draft_tokens_total", "member_accepted_tokens_total"), ("backend", "member", "source")),
}
"""The samples that are read, without agentspec_, and the labels that they are added up by."""

Values = Counter[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the metrics were at a time: `at` in seconds since 1970, `clock` by a clock that never goes back."""

    values: Mapping[str, Values] = field(default_factory=dict)
    at: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, registry: CollectorRegistry) -> Reading:
        values: dict[str, Values] = {name: Counter() for name in _READ}
        for family in registry.collect():
            for sample in family.samples:
                name = sample.name.removeprefix("agentspec_")
                if name in values:
                    values[name][tuple(sample.labels[label] for label in _READ[name])] += sample.value  # type: ignore[assignment]
        return cls(values)

    def total(self, name: str) -> float:
        return sum(self.values[name].values())

    def members(self) -> list[dict[str, Any]]:
        """The servers of pools, each with its state and its totals."""
        found = []
        for (backend, member, state), here in self.values["member_state"].items():
            if here:
                totals = ("member_in_flight", "member_calls_total", "member_failures_total")
                running, calls, failures = (self.values[name][backend, member] for name in totals)
                counts = {"in_flight": running, "calls": calls, "failures": failures}
                found.append({"backend": backend, "member": member, "state": state, **counts})
        return found


def figures(before: Reading, after: Reading) -> dict[str, Any]:
    """What went on in the `seconds` between two readings: rates are per second, ratios None where nothing happened.

    Tokens are counted when their answer ends. `tokens_per_step` is that of models that report their forwards;
    `acceptance` is the share of drafted tokens that were kept, by source in the engines of this process and the servers
    of pools, and under "all" by what every answer reported.
    """
    seconds = max(after.clock - before.clock, 1e-9)

    def grown(name: str) -> Values:
        values = Counter(after.values[name])
        values.subtract(before.values[name])
        return values

    requests, steps, tokens = (
        grown(name) for name in ("requests_total", "verify_steps_total", "completion_tokens_total")
    )
    answered = Counter({key: count for key, count in requests.items() if key[0]})  # others ask no model
    firsts = grown("time_to_first_token_seconds_count").total()

    def by_source(name: str) -> Values:
        """Also of a pool's server, from when it is first read: its counter is older, and begins anew with it."""
        values, name = grown(f"engine_{name}"), f"member_{name}"
        for server in before.values[name].keys() & after.values[name].keys():
            values[server[2:]] += max(0, after.values[name][server] - before.values[name][server])
        return values

    drafted, kept = by_source("draft_tokens_total"), by_source("accepted_tokens_total")
    return {
        "at": after.at,
        "seconds": seconds,
        "requests": answered.total() / seconds,
        "failed": sum(count for (_, outcome), count in answered.items() if outcome == "server_error") / seconds,
        "tokens": tokens.total() / seconds,
        "tokens_per_step": _ratio(sum(tokens[key] for key, count in steps.items() if count), steps.total()),
        "first_token": _ratio(grown("time_to_first_token_seconds_sum").total(), firsts),
        "acceptance": {
            "all": _ratio(grown("accepted_tokens_total").total(), grown("draft_tokens_total").total()),
            **{source: _ratio(kept[source,], count) for (source,), count in drafted.items()},
        },
        "running": after.total("tenant_running"),
        "queued": after.total("tenant_waiting") + after.total("engine_queued"),
        "memory": after.total("process_resident_memory_bytes"),
        "index": after.total("index_bytes"),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


class History:
    """A bounded ring of points, one for each `EVERY` seconds while `run` runs. Used in one event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.points: deque[dict[str, Any]] = deque(maxlen=POINTS)
        self.added = 0  # points so far, those that left the ring too
        self._ticks: deque[Reading] = deque(maxlen=2)
        self._newest: Reading | None = None

    async def run(self) -> None:
        """Add points until the task is cancelled."""
        while True:
            try:
                await self.tick()
            except Exception as error:  # what cannot be read now may be read later
                _log.warning("the metrics cannot be read for the page: %s", error_location(error))
            await asyncio.sleep(EVERY)

    async def tick(self) -> None:
        """Add a point. The first reading is only where the next point begins."""
        reading = self._newest = await self._read()
        if self._ticks:
            self.points.append(figures(self._ticks[-1], reading))
            self.added += 1
        self._ticks.append(reading)

    async def now(self) -> dict[str, Any]:
        """The figures of the last seconds (`EVERY` of them at least, if it is as long), and the pools' servers."""
        if self._newest is None or time.monotonic() - self._newest.clock >= FRESH:
            self._newest = await self._read()
        newest = self._newest
        since = next((one for one in reversed(self._ticks) if newest.clock - one.clock >= EVERY), None)
        since = since or (self._ticks[0] if self._ticks else newest)
        return {**figures(since, newest), "members": newest.members()}

    async def _read(self) -> Reading:
        return await anyio.to_thread.run_sync(Reading.of, self._registry)
