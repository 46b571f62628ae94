"""The gateway's Prometheus metrics. Labels are routes, configured model names and outcomes, never user data.

Queries compute ratios (acceptance, tokens per step) from the counters."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, TypeVar, cast

from prometheus_client import Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from agentspec.telemetry.scrape import Registry
from agentspec.types import Speculation

T = TypeVar("T", Counter, Histogram)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OTHER = "other"
_HELPERS = ("small", "judge")  # the roles of models that a strategy can go on without
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters and histograms of one gateway, in their own registry.

    `models` are the names that may become a label value; other names are counted as "other". `scraped` are metrics
    that each scrape computes.
    """

    def __init__(self, *, version: str, models: Collection[str] = (), scraped: Iterable[Collector] = ()) -> None:
        self.registry = registry = Registry()
        self._models = frozenset(models)
        self._children: dict[tuple[object, ...], Any] = {}
        model = ("model",)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._requests = counter("agentspec_requests", "Requests answered", ("route", "model", "outcome"))
        self._duration = histogram("agentspec_request_duration_seconds", "Whole request", ("route", "model"))
        failed = "Requests that failed, by status and code of the error"
        self._errors = counter("agentspec_errors", failed, ("model", "status", "error"))
        self._spent = {
            name: histogram(f"agentspec_{name}_seconds", help, model, buckets=buckets)
            for name, help, buckets in (
                ("queue_time", "From the end of a request's body to its slot", _SECONDS),
                ("time_to_first_token", "From the request's arrival to its first token", _SECONDS),
                ("time_per_output_token", "Time between the tokens of an answer, its mean", _TOKEN_SECONDS),
            )
        }
        self._prompt = counter("agentspec_prompt_tokens", "Prompt tokens", model)
        self._completion = counter("agentspec_completion_tokens", "Tokens answered", model)
        self._drafted = counter("agentspec_draft_tokens", "Tokens proposed", model)
        self._accepted = counter("agentspec_accepted_tokens", "Proposed tokens kept", model)
        self._steps = counter("agentspec_verify_steps", "Verification forwards", model)
        self._rounds = counter("agentspec_strategy_rounds", "Steps of thinking, rounds of retrieval", model)
        alone = "Answers in which the model of a role failed, so that the base model went on alone"
        self._off = counter("agentspec_speculation_off", alone, ("model", "reason"))
        refused = "Requests refused with 429, by the key's limit, or as overloaded"
        self._rejected = counter("agentspec_rejected", refused, ("tenant", "reason"))
        of_tenants = "Tokens of tenants' prompts and answers"
        self._tenant_tokens = counter("agentspec_tenant_tokens", of_tenants, ("tenant", "kind"))
        self.in_flight = Gauge("agentspec_requests_in_flight", "Requests being answered", registry=registry)
        Info("agentspec_build", "What is running", registry=registry).info(
            {"version": version, "python": platform.python_version()}
        )
        ProcessCollector(registry=registry)
        for collector in scraped:
            registry.register(collector)

    def connections(self, count: Callable[[], int]) -> None:
        """Report at each scrape how many connections are open."""
        Gauge("agentspec_connections", "Open connections of clients", registry=self.registry).set_function(count)

    def request(self, route: str, model: str | None, outcome: str, seconds: float) -> None:
        """Count one finished request. `route` and `outcome` must come from a fixed set."""
        label = self._label(model)
        self._child(self._requests, route, label, outcome).inc()
        self._child(self._duration, route, label).observe(seconds)

    def error(self, model: str | None, status: int, code: str) -> None:
        """Count a failed request; `code` is one of docs/errors.md."""
        self._errors.labels(self._label(model), str(status), code).inc()

    def spent(self, model: str | None, **seconds: float | None) -> None:
        """Observe what took so long: `queue_time`, `time_to_first_token`, `time_per_output_token`; None is left out."""
        for name, value in seconds.items():
            if value is not None:
                self._child(self._spent[name], self._label(model)).observe(value)

    def tokens(self, model: str | None, *, prompt: int, completion: int) -> None:
        label = self._label(model)
        self._child(self._prompt, label).inc(prompt)
        self._child(self._completion, label).inc(completion)

    def speculation(self, model: str | None, done: Speculation, failed_roles: Iterable[str] = ()) -> None:
        """Count what speculation did for one answer; of `failed_roles`, which an upstream may have sent, known ones."""
        label = self._label(model)
        for role in set(_HELPERS).intersection(failed_roles):
            self._off.labels(label, f"{role}_failed").inc()
        self._drafted.labels(label).inc(done.drafted)
        self._accepted.labels(label).inc(done.accepted)
        self._steps.labels(label).inc(done.forwards)
        self._rounds.labels(label).inc(done.steps - done.forwards)

    def tenant_tokens(self, tenant: str, *, prompt: int, completion: int) -> None:
        self._child(self._tenant_tokens, tenant, "prompt").inc(prompt)
        self._child(self._tenant_tokens, tenant, "completion").inc(completion)

    def rejected(self, tenant: str, reason: str) -> None:
        self._rejected.labels(tenant, reason).inc()

    def _child(self, metric: T, *labels: str) -> T:
        """The sample of these labels, remembered: looking it up by `labels` costs several times as much."""
        key = (id(metric), *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return cast(T, child)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _label(self, model: str | None) -> str:
        if model is None:
            return ""
        return model if model in self._models else OTHER
