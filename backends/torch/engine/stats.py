"""The engine's counters, and the snapshot in which it reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from agentspec.types import Source

if TYPE_CHECKING:
    from agentspec.backends.torch.drafters.factory import DrafterFactory
    from agentspec.backends.torch.engine.engine import Engine
    from agentspec.backends.torch.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Token counts are totals since load; `*_by_source` use the names of `Source.NAMES`.

    `steps` counts the steps in which an answer drew tokens; `batch_sizes` counts forwards by their number of answers.
    `draft_sizes` counts answers' steps, and `step_drafts` whole steps, by the number of draft tokens verified.
    `graph_sizes` are the numbers of tokens recorded as CUDA graphs; `graph_replays` counts the forwards they served.
    `substituted` counts drafted tokens that a lossy rule accepted in place of the model's own.
    `prefills` counts prompts read ahead that were launched, used and cancelled, and the tokens computed for them.
    """

    model: str
    device: str
    dtype: str
    attention: str
    packed_layers: int
    graph_sizes: tuple[int, ...]
    graph_replays: int
    adapter: str | None
    speculation: bool
    drafters: tuple[str, ...]
    draft_model: str | None
    queued: int
    active: int
    requests: int
    failed: int
    cancelled: int
    tokens: int
    steps: int
    drafted_by_source: Mapping[str, int]
    accepted_by_source: Mapping[str, int]
    prefill_tokens: int
    reused_tokens: int
    prefix_sequences: int
    prefix_bytes: int
    preempted: int
    kv_rows: int
    kv_rows_limit: int | None
    batch_sizes: Mapping[int, int]
    draft_sizes: Mapping[int, int]
    step_drafts: Mapping[int, int]
    cost_seconds: Mapping[int, float]
    draft_failures: int = 0
    substituted: int = 0
    prefills: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """The running totals that `EngineStats` reports. The engine's thread writes them, except `requests` and
    `cancelled`, which the scheduler writes under its lock.
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
    draft_sizes: Counter[int] = field(default_factory=Counter)
    step_drafts: Counter[int] = field(default_factory=Counter)
    draft_failures: int = 0  # answers whose drafter failed
    substituted: int = 0  # drafted tokens that a lossy rule accepted in place of the model's own


def snapshot(engine: Engine, loaded: LoadedModel, drafters: DrafterFactory, *, speculation: bool) -> EngineStats:
    """The counters and the state of an engine now."""
    target, scheduler, counters = loaded.target, engine.scheduler, engine.context.counters
    return EngineStats(
        model=loaded.name,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        attention=target.attention,
        packed_layers=loaded.packed,
        graph_sizes=() if target.graphs is None else target.graphs.sizes,
        graph_replays=0 if target.graphs is None else target.graphs.replays,
        adapter=loaded.adapter,
        speculation=speculation,
        drafters=tuple(drafters.names) if speculation else (),
        draft_model=None if drafters.draft_model is None else drafters.draft_model.name,
        queued=scheduler.num_waiting,
        active=len(scheduler.active),
        requests=counters.requests,
        failed=counters.failed,
        cancelled=counters.cancelled,
        tokens=counters.tokens,
        steps=counters.steps,
        drafted_by_source=_named(counters.drafted),
        accepted_by_source=_named(counters.accepted),
        prefill_tokens=counters.prefill_tokens,
        reused_tokens=counters.reused_tokens,
        prefix_sequences=len(scheduler.prefix_cache),
        prefix_bytes=scheduler.prefix_cache.nbytes,
        preempted=counters.preempted,
        kv_rows=scheduler.kv_slots,
        kv_rows_limit=scheduler.kv_budget.limit,
        batch_sizes=dict(counters.batch_sizes),
        draft_sizes=dict(counters.draft_sizes),
        step_drafts=dict(counters.step_drafts),
        cost_seconds=engine.context.governor.cost.table(),
        draft_failures=counters.draft_failures,
        substituted=counters.substituted,
        prefills=asdict(engine.prefills.queue.counts),
    )


def _named(by_source: Mapping[int, int]) -> dict[str, int]:
    return {Source.NAMES[source]: amount for source, amount in sorted(by_source.items())}
