"""The metrics that each scrape computes anew, from counts that backends, tenants and servers keep themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from agentspec.telemetry.samples import (
    BackendSample,
    EngineSample,
    IndexFigures,
    MemberSample,
    TenantSample,
    UpstreamSample,
)

S = TypeVar("S")
Labelled = Iterable[tuple[tuple[str, ...], float]]
_PREFILL_OUTCOMES = ("launched", "used", "cancelled")
_BACKEND, _TENANT, _MEMBER = ("backend",), ("tenant",), ("backend", "member")

_GAVE_UP = "Answers whose drafter failed, which went on without"
_SUBSTITUTED = "Tokens that a lossy rule accepted for the model's own"
_EARLY = "Prompts read before they came, by outcome"
_SEEN = "Processes of the gateway that see the server so"


@dataclass(frozen=True, slots=True)
class Family(Generic[S]):
    """One metric: `read` returns its label values and numbers in one sample."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[S], Labelled]


def _counter(name: str, help: str, labels: tuple[str, ...], number: Callable[[S], float]) -> Family[S]:
    """A total for each sample, whose attributes `labels` are the values of the labels of the same names."""
    return Family(CounterMetricFamily, name, help, labels, lambda one: [(_values(one, labels), number(one))])


def _gauge(name: str, help: str, labels: tuple[str, ...], number: Callable[[S], float]) -> Family[S]:
    """As `_counter`, for a number that can fall."""
    return Family(GaugeMetricFamily, name, help, labels, lambda one: [(_values(one, labels), number(one))])


def _values(sample: object, labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(getattr(sample, label) for label in labels)


def _by_source(name: str, help: str, counts: Callable[[EngineSample], Mapping[str, int]]) -> Family[EngineSample]:
    def read(engine: EngineSample) -> Labelled:
        return [((engine.backend, source), count) for source, count in counts(engine).items()]

    return Family(CounterMetricFamily, name, help, ("backend", "source"), read)


def _outcomes(engine: EngineSample) -> Labelled:
    return [((engine.backend, outcome), engine.prefills.get(outcome, 0)) for outcome in _PREFILL_OUTCOMES]


def _in_forwards(engine: EngineSample) -> int:
    """How many answers all forwards computed, each counted once for each forward."""
    return sum(size * count for size, count in engine.forwards.items())


_ENGINES: tuple[Family[EngineSample], ...] = (
    _by_source("agentspec_engine_draft_tokens", "Tokens proposed, by source", lambda one: one.drafted),
    _by_source("agentspec_engine_accepted_tokens", "Tokens kept, by source", lambda one: one.accepted),
    _gauge("agentspec_engine_queued", "Requests waiting for the engine", _BACKEND, lambda one: one.queued),
    _gauge("agentspec_engine_active", "Requests being decoded", _BACKEND, lambda one: one.active),
    _gauge("agentspec_engine_kv_rows", "Key/value rows reserved", _BACKEND, lambda one: one.rows),
    _counter("agentspec_engine_preempted", "Answers that made room", _BACKEND, lambda one: one.preempted),
    _counter("agentspec_engine_forwards", "Forwards", _BACKEND, lambda one: sum(one.forwards.values())),
    _counter("agentspec_engine_forward_requests", "Answers in forwards", _BACKEND, _in_forwards),
    _counter("agentspec_engine_draft_failures", _GAVE_UP, _BACKEND, lambda one: one.draft_failures),
    _counter("agentspec_engine_lossy_tokens", _SUBSTITUTED, _BACKEND, lambda one: one.substituted),
    Family(CounterMetricFamily, "agentspec_engine_prefills", _EARLY, ("backend", "outcome"), _outcomes),
    _counter(
        "agentspec_engine_prefill_tokens", "Tokens read ahead", _BACKEND, lambda one: one.prefills.get("tokens", 0)
    ),
)

_UPSTREAMS: tuple[Family[UpstreamSample], ...] = (
    _counter("agentspec_upstream_drafts", "Drafts that a vLLM upstream verified", _BACKEND, lambda one: one.drafts),
    _counter("agentspec_upstream_draft_tokens", "Tokens proposed there", _BACKEND, lambda one: one.drafted),
    _counter("agentspec_upstream_accepted_tokens", "Proposed tokens kept there", _BACKEND, lambda one: one.accepted),
)

_TENANTS: tuple[Family[TenantSample], ...] = (
    _gauge("agentspec_tenant_running", "Requests being answered, by tenant", _TENANT, lambda one: one.running),
    _gauge("agentspec_tenant_waiting", "Requests waiting for a place", _TENANT, lambda one: one.waiting),
    _counter("agentspec_tenant_refused", "Requests that got no place (429)", _TENANT, lambda one: one.refused),
)

_MEMBERS: tuple[Family[MemberSample], ...] = (
    _gauge("agentspec_member_state", _SEEN, (*_MEMBER, "state"), lambda one: 1),
    _gauge("agentspec_member_in_flight", "Calls that a server is answering", _MEMBER, lambda one: one.in_flight),
    _counter("agentspec_member_calls", "Calls sent to a server, retries too", _MEMBER, lambda one: one.calls),
    _counter("agentspec_member_retries", "Those after another try", _MEMBER, lambda one: one.retries),
    _counter("agentspec_member_failures", "Calls that it failed", _MEMBER, lambda one: one.failures),
    _counter("agentspec_member_ejections", "Times it was left out", _MEMBER, lambda one: one.ejections),
)


def engines(samples: Iterable[BackendSample]) -> Iterator[Metric]:
    return _collected(_ENGINES, [one for one in samples if isinstance(one, EngineSample)])


def upstreams(samples: Iterable[BackendSample]) -> Iterator[Metric]:
    return _collected(_UPSTREAMS, [one for one in samples if isinstance(one, UpstreamSample)])


def tenants(samples: Iterable[TenantSample]) -> Iterator[Metric]:
    return _collected(_TENANTS, samples)


def members(samples: Iterable[MemberSample]) -> Iterator[Metric]:
    return _collected(_MEMBERS, samples)


def _collected(families: Iterable[Family[S]], samples: Iterable[S]) -> Iterator[Metric]:
    kept = list(samples)
    for family in families:
        metric = family.kind(family.name, family.help, labels=family.labels)
        for sample in kept:
            for labels, number in family.read(sample):
                metric.add_metric(labels, number)
        yield metric


def index(figures: IndexFigures | None) -> Iterator[Metric]:
    if figures is None:
        return
    yield GaugeMetricFamily("agentspec_index_bytes", "Memory of the token index", value=figures.bytes)
    yield GaugeMetricFamily("agentspec_index_sequences", "Sequences in the token index", value=figures.sequences)
    damaged = "Rows of the cache's database that cannot be read, and are left out"
    yield GaugeMetricFamily("agentspec_cache_damaged_rows", damaged, value=figures.damaged)
    unread = "Rows of the cache's database that are known of and not in the index yet, at most"
    yield GaugeMetricFamily("agentspec_cache_unread_rows", unread, value=figures.unread)
    behind = "Seconds since the index had last taken in all that other processes wrote"
    yield GaugeMetricFamily("agentspec_cache_behind_seconds", behind, value=figures.behind)
    pending = "1 while bytes of what was deleted may still be in the database's files"
    yield GaugeMetricFamily("agentspec_cache_erasure_pending", pending, value=figures.erasure_pending)


def connections(count: int, ended: Mapping[str, int]) -> Iterator[Metric]:
    yield GaugeMetricFamily("agentspec_connections", "Open connections of clients", value=count)
    by_reason = [((reason,), number) for reason, number in ended.items()]
    yield from _labelled("agentspec_connections_ended", "Connections ended by a limit", ("reason",), by_reason)


def _labelled(name: str, help: str, labels: tuple[str, ...], numbers: Labelled) -> Iterator[Metric]:
    """A total by labels."""
    return _collected([Family(CounterMetricFamily, name, help, labels, lambda found: found)], [numbers])
