"""What keys of all workers used: stored by the engine's process, which the workers tell over its socket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from agentspec.cache.usage import UsageRow
from agentspec.proxy.metering.key_limits import Owner
from agentspec.proxy.metering.store import UsageSource
from agentspec.proxy.workers.stored import RemoteStore


class RemoteUsage(RemoteStore):
    """The store of the process whose socket is at `path`. For threads that anyio started from the worker's loop."""

    route: ClassVar[str] = "/usage"

    def add(self, rows: Sequence[UsageRow], *, since: float, day: str, batch: str | None = None) -> Mapping[Owner, int]:
        """As of `UsageStore`. Raises `EngineRestartingError` if the process does not answer."""
        found = self.ask("add", [asdict(row) for row in rows], since, day, batch)
        return {(tenant, key): tokens for tenant, key, tokens in found}


def answer_usage(source: UsageSource, name: str, told: Sequence[Any]) -> list[tuple[str, str, int]]:
    """What `RemoteUsage` is answered."""
    rows, since, day, batch = told
    stored = source().add([UsageRow(**row) for row in rows], since=since, day=day, batch=batch)
    return [(*owner, tokens) for owner, tokens in stored.items()]
