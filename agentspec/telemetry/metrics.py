"""The gateway's Prometheus metrics. Labels are routes, configured model names and outcomes, never user data.

Queries compute ratios (acceptance, tokens per step) from the counters.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentspec.telemetry.samples import BackendSample, EngineSample, MemberSample, TenantSample, UpstreamSample

T = TypeVar("T", Counter, Histogram)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
_HELPERS = ("small", "judge")  # the roles of models that a strategy can go on without
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters and histograms of one gateway, in their own registry.

    `models` are the names that may become a label value; other names are counted as "other". Each scrape calls
    `index_size`, which returns (bytes, sequences, rows that cannot be read) or None, `backends`, which returns the
    backends' own counts, `tenants`, which returns the counts of each tenant's requests, and `members`, those of the
    servers of pools.
    """

    def __init__(
        self,
        *,
        version: str,
        models: Collection[str] = (),
        index_size: Callable[[], tuple[int, int, int] | None] = lambda: None,
        backends: Callable[[], Iterable[BackendSample]] = lambda: (),
        tenants: Callable[[], Iterable[TenantSample]] = lambda: (),
        members: Callable[[], Iterable[MemberSample]] = lambda: (),
    ) -> None:
        self.registry = registry = CollectorRegistry()
        self._models = frozenset(models)
        self._children: dict[tuple[object, ...], Any] = {}
        model = ("model",)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._requests = counter("agentspec_requests", "Requests answered", ("route", "model", "outcome"))
        self._duration = histogram("agentspec_request_duration_seconds", "Whole request", ("route", "model"))
        from_arrival = "From the request's arrival to its first token"
        self._first = histogram("agentspec_time_to_first_token_seconds", from_arrival, model)
        self._prompt = counter("agentspec_prompt_tokens", "Prompt tokens", model)
        self._completion = counter("agentspec_completion_tokens", "Tokens answered", model)
        self._drafted = counter("agentspec_draft_tokens", "Tokens proposed", model)
        self._accepted = counter("agentspec_accepted_tokens", "Proposed tokens kept", model)
        self._steps = counter("agentspec_verify_steps", "Verification forwards", model)
        alone = "Answers in which the model of a role failed, so that the base model went on alone"
        self._off = counter("agentspec_speculation_off", alone, ("model", "reason"))
        unpredicted = "Requests that an upstream refused with a prediction and got again without"
        self._unpredicted = counter("agentspec_auto_predictions_refused", unpredicted, model)
        limited = "Requests that a limit of their key refused (429)"
        self._limited = counter("agentspec_rate_limited", limited, ("tenant", "limit"))
        of_tenants = "Tokens of tenants' prompts and answers"
        self._tenant_tokens = counter("agentspec_tenant_tokens", of_tenants, ("tenant", "kind"))
        self.in_flight = Gauge("agentspec_requests_in_flight", "Requests being answered", registry=registry)
        Info("agentspec_build", "What is running", registry=registry).info(
            {"version": version, "python": platform.python_version()}
        )
        registry.register(_OnScrape(lambda: _index(index_size())))
        registry.register(_OnScrape(lambda: _engines(backends())))
        registry.register(_OnScrape(lambda: _upstreams(backends())))
        registry.register(_OnScrape(lambda: _tenants(tenants())))
        registry.register(_OnScrape(lambda: _members(members())))

    def connections(self, counts: Callable[[], tuple[int, Mapping[str, int]]]) -> None:
        """Report at each scrape what `counts` returns: open connections, and those ended by a limit, by reason."""
        self.registry.register(_OnScrape(lambda: _connections(*counts())))

    def prefills(self, counts: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Report at each scrape what `counts` returns: prefills of next turns by upstream and outcome."""
        self.registry.register(_OnScrape(lambda: _upstream_prefills(counts())))

    def request(self, route: str, model: str | None, outcome: str, seconds: float) -> None:
        """Count one finished request. `route` and `outcome` must come from a fixed set."""
        label = self._label(model)
        self._child(self._requests, route, label, outcome).inc()
        self._child(self._duration, route, label).observe(seconds)

    def first_token(self, model: str | None, seconds: float) -> None:
        self._child(self._first, self._label(model)).observe(seconds)

    def tokens(self, model: str | None, *, prompt: int, completion: int) -> None:
        label = self._label(model)
        self._child(self._prompt, label).inc(prompt)
        self._child(self._completion, label).inc(completion)

    def speculation(
        self, model: str | None, *, drafted: int, accepted: int, steps: int, failed_roles: Iterable[str] = ()
    ) -> None:
        """Count what speculation did for one answer; of `failed_roles`, which an upstream may have sent, known ones."""
        label = self._label(model)
        for role in set(_HELPERS).intersection(failed_roles):
            self._off.labels(label, f"{role}_failed").inc()
        self._drafted.labels(label).inc(drafted)
        self._accepted.labels(label).inc(accepted)
        self._steps.labels(label).inc(steps)

    def prediction_refused(self, model: str | None) -> None:
        self._unpredicted.labels(self._label(model)).inc()

    def tenant_tokens(self, tenant: str, *, prompt: int, completion: int) -> None:
        """Count the tokens of a tenant's request; the tenant is a configured one."""
        self._child(self._tenant_tokens, tenant, "prompt").inc(prompt)
        self._child(self._tenant_tokens, tenant, "completion").inc(completion)

    def limited(self, tenant: str, limit: str) -> None:
        """Count a request that a limit of its key refused; both labels are of the configuration."""
        self._limited.labels(tenant, limit).inc()

    def _child(self, metric: T, *labels: str) -> T:
        """The sample of these labels, remembered: looking it up by `labels` costs several times as much."""
        key = (id(metric), *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return cast(T, child)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _label(self, model: str | None) -> str:
        if model is None:
            return ""
        return model if model in self._models else OTHER


class _OnScrape(Collector):
    """Metrics that are computed at each scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()

    def describe(self) -> list[Metric]:
        return []


def _index(size: tuple[int, int, int] | None) -> Iterator[Metric]:
    if size is not None:
        yield GaugeMetricFamily("agentspec_index_bytes", "Memory of the token index", value=size[0])
        yield GaugeMetricFamily("agentspec_index_sequences", "Sequences in the token index", value=size[1])
        damaged = "Rows of the cache's database that cannot be read, and are left out"
        yield GaugeMetricFamily("agentspec_cache_damaged_rows", damaged, value=size[2])


def _upstream_prefills(counts: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    told = "Requests that let an upstream read a next turn ahead, by outcome"
    family = CounterMetricFamily("agentspec_upstream_prefills", told, labels=("backend", "outcome"))
    for labels, number in dict(counts).items():
        family.add_metric(labels, number)
    yield family


def _connections(count: int, ended: Mapping[str, int]) -> Iterator[Metric]:
    yield GaugeMetricFamily("agentspec_connections", "Open connections of clients", value=count)
    family = CounterMetricFamily("agentspec_connections_ended", "Connections ended by a limit", labels=("reason",))
    for reason, number in ended.items():
        family.add_metric([reason], number)
    yield family


def _engines(samples: Iterable[BackendSample]) -> Iterator[Metric]:
    labels = ("backend", "source")
    drafted = CounterMetricFamily("agentspec_engine_draft_tokens", "Tokens proposed, by source", labels=labels)
    accepted = CounterMetricFamily("agentspec_engine_accepted_tokens", "Tokens kept, by source", labels=labels)
    queued = GaugeMetricFamily("agentspec_engine_queued", "Requests waiting for the engine", labels=("backend",))
    active = GaugeMetricFamily("agentspec_engine_active", "Requests being decoded", labels=("backend",))
    rows = GaugeMetricFamily("agentspec_engine_kv_rows", "Key/value rows reserved", labels=("backend",))
    preempted = CounterMetricFamily("agentspec_engine_preempted", "Answers that made room", labels=("backend",))
    forwards = CounterMetricFamily("agentspec_engine_forwards", "Forwards", labels=("backend",))
    shares = CounterMetricFamily("agentspec_engine_forward_requests", "Answers in forwards", labels=("backend",))
    failures = CounterMetricFamily(
        "agentspec_engine_draft_failures", "Answers whose drafter failed, which went on without", labels=("backend",)
    )
    lossy = CounterMetricFamily(
        "agentspec_engine_lossy_tokens", "Tokens that a lossy rule accepted for the model's own", labels=("backend",)
    )
    ahead = CounterMetricFamily(
        "agentspec_engine_prefills", "Prompts read before they came, by outcome", labels=("backend", "outcome")
    )
    ahead_tokens = CounterMetricFamily("agentspec_engine_prefill_tokens", "Tokens read ahead", labels=("backend",))
    for engine in (sample for sample in samples if isinstance(sample, EngineSample)):
        for outcome in ("launched", "used", "cancelled"):
            ahead.add_metric([engine.backend, outcome], engine.prefills.get(outcome, 0))
        ahead_tokens.add_metric([engine.backend], engine.prefills.get("tokens", 0))
        lossy.add_metric([engine.backend], engine.substituted)
        failures.add_metric([engine.backend], engine.draft_failures)
        queued.add_metric([engine.backend], engine.queued)
        active.add_metric([engine.backend], engine.active)
        rows.add_metric([engine.backend], engine.rows)
        preempted.add_metric([engine.backend], engine.preempted)
        forwards.add_metric([engine.backend], sum(engine.forwards.values()))
        shares.add_metric([engine.backend], sum(size * count for size, count in engine.forwards.items()))
        for family, counts in ((drafted, engine.drafted), (accepted, engine.accepted)):
            for source, count in counts.items():
                family.add_metric([engine.backend, source], count)
    yield from (
        drafted,
        accepted,
        queued,
        active,
        rows,
        preempted,
        forwards,
        shares,
        failures,
        lossy,
        ahead,
        ahead_tokens,
    )


def _upstreams(samples: Iterable[BackendSample]) -> Iterator[Metric]:
    label = ("backend",)
    drafts = CounterMetricFamily("agentspec_upstream_drafts", "Drafts that a vLLM upstream verified", labels=label)
    drafted = CounterMetricFamily("agentspec_upstream_draft_tokens", "Tokens proposed there", labels=label)
    accepted = CounterMetricFamily("agentspec_upstream_accepted_tokens", "Proposed tokens kept there", labels=label)
    for upstream in (sample for sample in samples if isinstance(sample, UpstreamSample)):
        drafts.add_metric([upstream.backend], upstream.drafts)
        drafted.add_metric([upstream.backend], upstream.drafted)
        accepted.add_metric([upstream.backend], upstream.accepted)
    yield from (drafts, drafted, accepted)


def _tenants(samples: Iterable[TenantSample]) -> Iterator[Metric]:
    label = ("tenant",)
    running = GaugeMetricFamily("agentspec_tenant_running", "Requests being answered, by tenant", labels=label)
    waiting = GaugeMetricFamily("agentspec_tenant_waiting", "Requests waiting for a place", labels=label)
    refused = CounterMetricFamily("agentspec_tenant_refused", "Requests that got no place (429)", labels=label)
    for one in samples:
        running.add_metric([one.tenant], one.running)
        waiting.add_metric([one.tenant], one.waiting)
        refused.add_metric([one.tenant], one.refused)
    yield from (running, waiting, refused)


def _members(samples: Iterable[MemberSample]) -> Iterator[Metric]:
    label = ("backend", "member")
    state = GaugeMetricFamily(
        "agentspec_member_state", "Processes of the gateway that see the server so", labels=(*label, "state")
    )
    flying = GaugeMetricFamily("agentspec_member_in_flight", "Calls that a server is answering", labels=label)
    totals = {
        "calls": CounterMetricFamily("agentspec_member_calls", "Calls sent to a server, retries too", labels=label),
        "retries": CounterMetricFamily("agentspec_member_retries", "Those after another try", labels=label),
        "failures": CounterMetricFamily("agentspec_member_failures", "Calls that it failed", labels=label),
        "ejections": CounterMetricFamily("agentspec_member_ejections", "Times it was left out", labels=label),
    }
    for one in samples:
        names = [one.backend, one.member]
        state.add_metric([*names, one.state], 1)
        flying.add_metric(names, one.in_flight)
        for name, family in totals.items():
            family.add_metric(names, getattr(one, name))
    yield from (state, flying, *totals.values())
