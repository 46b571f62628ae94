"""The engine's counters, and the snapshot in which it reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from agentspec.types import Source

if TYPE_CHECKING:
    from agentspec.backends.torch.engine.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals since load. The engine's thread writes them, except `requests` and `cancelled`, which the
    scheduler writes under its lock.

    `steps` counts the steps in which an answer drew tokens; `batch_sizes` counts forwards by their number of answers.
    `drafted` and `accepted` count tokens by their `Source`, `draft_lengths` drafts by how many of their tokens
    were accepted, `draft_failures` answers whose drafter failed. `prefills` counts prompts read ahead (launched),
    those that a request used, and the tokens computed for them.
    """

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    steps: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    draft_lengths: Counter[int] = field(default_factory=Counter)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    draft_failures: int = 0
    prefills: Counter[str] = field(default_factory=lambda: Counter(launched=0, used=0, tokens=0))


@dataclass(slots=True, kw_only=True)
class EngineStats(Counters):
    """A snapshot of the counters, of the requests that wait and run, and of the KV slots that are reserved."""

    queued: int
    active: int
    kv_rows: int

    @property
    def drafted_by_source(self) -> dict[str, int]:
        """`drafted`, by the names of `Source.NAMES`."""
        return _named(self.drafted)

    @property
    def accepted_by_source(self) -> dict[str, int]:
        return _named(self.accepted)


def snapshot(counters: Counters, scheduler: Scheduler) -> EngineStats:
    """The counters and the state of an engine now."""
    return EngineStats(
        **{one.name: copy(getattr(counters, one.name)) for one in fields(Counters)},
        queued=scheduler.num_waiting,
        active=len(scheduler.active),
        kv_rows=scheduler.kv_slots,
    )


def _named(by_source: Mapping[int, int]) -> dict[str, int]:
    return {Source.NAMES[source]: amount for source, amount in sorted(by_source.items())}
