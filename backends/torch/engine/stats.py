"""The engine's counters, and the snapshot in which it reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from agentspec.types import Source

if TYPE_CHECKING:
    from agentspec.backends.torch.drafters.factory import DrafterFactory
    from agentspec.backends.torch.engine.engine import Engine
    from agentspec.backends.torch.loader import LoadedModel


@dataclass(slots=True, kw_only=True)
class Counters:
    """Running totals since load. The engine's thread writes them, except `requests` and `cancelled`, which the
    scheduler writes under its lock.

    `steps` counts the steps in which an answer drew tokens; `batch_sizes` counts forwards by their number of answers.
    `drafted` and `accepted` count tokens by their `Source`, `draft_failures` answers whose drafter failed, and
    `substituted` drafted tokens that a lossy rule accepted in place of the model's own.
    """

    requests: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    preempted: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    draft_failures: int = 0
    substituted: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats(Counters):
    """A snapshot of the counters and of the engine's state.

    `graph_sizes` are the numbers of tokens recorded as CUDA graphs; `graph_replays` counts the forwards they served.
    `prefills` counts prompts read ahead that were launched, used and cancelled, and the tokens computed for them.
    """

    model: str
    device: str
    dtype: str
    attention: str
    packed_layers: int
    graph_sizes: tuple[int, ...]
    graph_replays: int
    speculation: bool
    drafters: tuple[str, ...]
    draft_model: str | None
    queued: int
    active: int
    prefix_bytes: int
    kv_rows: int
    kv_rows_limit: int
    cost_seconds: Mapping[int, float]
    prefills: Mapping[str, int]

    @property
    def drafted_by_source(self) -> dict[str, int]:
        """`drafted`, by the names of `Source.NAMES`."""
        return _named(self.drafted)

    @property
    def accepted_by_source(self) -> dict[str, int]:
        return _named(self.accepted)


def snapshot(engine: Engine, loaded: LoadedModel, drafters: DrafterFactory, *, speculation: bool) -> EngineStats:
    """The counters and the state of an engine now."""
    target, scheduler, counters = loaded.target, engine.scheduler, engine.context.counters
    return EngineStats(
        **{one.name: copy(getattr(counters, one.name)) for one in fields(Counters)},
        model=loaded.name,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        attention=target.attention,
        packed_layers=loaded.packed,
        graph_sizes=() if target.graphs is None else target.graphs.sizes,
        graph_replays=0 if target.graphs is None else target.graphs.replays,
        speculation=speculation,
        drafters=tuple(drafters.names) if speculation else (),
        draft_model=None if drafters.draft_model is None else drafters.draft_model.name,
        queued=scheduler.num_waiting,
        active=len(scheduler.active),
        prefix_bytes=scheduler.prefix_cache.nbytes,
        kv_rows=scheduler.kv_slots,
        kv_rows_limit=scheduler.kv_budget.limit,
        cost_seconds=engine.context.governor.cost.table(),
        prefills=dict(engine.prefills.queue.counts),
    )


def _named(by_source: Mapping[int, int]) -> dict[str, int]:
    return {Source.NAMES[source]: amount for source, amount in sorted(by_source.items())}
