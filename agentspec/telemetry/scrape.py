"""The metrics that a scrape computes of what backends, tenants, pools and the token index report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from agentspec.telemetry.samples import EngineSample, IndexFigures, MemberSample, TenantSample

S = TypeVar("S")
_PREFILL_OUTCOMES = ("launched", "used")


@dataclass(frozen=True, slots=True)
class Family(Generic[S]):
    """One metric that a scrape computes: `read` returns a sample's number, or its numbers by the values of the label
    `by`. A number that `falls` is a gauge, else it is a total.
    """

    name: str
    help: str
    read: Callable[[S], float | Mapping[str, float]]
    by: str = ""
    falls: bool = False


_gauge = partial(Family, falls=True)

ENGINE: tuple[Family[EngineSample], ...] = (
    Family("agentspec_engine_draft_tokens", "Tokens proposed, by source", lambda one: one.drafted, "source"),
    Family("agentspec_engine_accepted_tokens", "Tokens kept, by source", lambda one: one.accepted, "source"),
    _gauge("agentspec_engine_queued", "Requests waiting for the engine", lambda one: one.queued),
    _gauge("agentspec_engine_active", "Requests being decoded", lambda one: one.active),
    _gauge("agentspec_engine_kv_rows", "Key/value rows reserved", lambda one: one.rows),
    Family("agentspec_engine_forwards", "Forwards", lambda one: sum(one.forwards.values())),
    Family(
        "agentspec_engine_forward_requests",
        "Answers in forwards, each counted once for each forward",
        lambda one: sum(size * count for size, count in one.forwards.items()),
    ),
    Family("agentspec_engine_draft_failures", "Answers whose drafter failed", lambda one: one.draft_failures),
    Family(
        "agentspec_engine_prefills",
        "Prompts read before they came, by outcome",
        lambda one: {outcome: one.prefills.get(outcome, 0) for outcome in _PREFILL_OUTCOMES},
        "outcome",
    ),
    Family("agentspec_engine_prefill_tokens", "Tokens read ahead", lambda one: one.prefills.get("tokens", 0)),
)

SPEC_DECODE: tuple[Family[EngineSample], ...] = (
    Family("vllm:spec_decode_num_drafts", "Drafts verified", lambda one: sum(one.draft_lengths.values())),
    Family("vllm:spec_decode_num_draft_tokens", "Tokens proposed", lambda one: sum(one.drafted.values())),
    Family("vllm:spec_decode_num_accepted_tokens", "Tokens kept", lambda one: sum(one.accepted.values())),
    Family(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafts of which a token at this depth was kept",
        lambda one: _by_position(one.draft_lengths),
        "position",
    ),
)
"""The same under the names of vLLM, whose dashboards read them."""

TENANT: tuple[Family[TenantSample], ...] = (
    _gauge("agentspec_tenant_running", "Requests being answered, by tenant", lambda one: one.running),
    _gauge("agentspec_tenant_waiting", "Requests waiting for a slot", lambda one: one.waiting),
)

MEMBER: tuple[Family[MemberSample], ...] = (
    _gauge("agentspec_member_state", "Gateways that see the server so", lambda one: {one.state: 1}, "state"),
    _gauge("agentspec_member_in_flight", "Calls that a server is answering", lambda one: one.in_flight),
    Family("agentspec_member_calls", "Calls sent to a server, retries too", lambda one: one.calls),
    Family("agentspec_member_retries", "Those after another try", lambda one: one.retries),
    Family("agentspec_member_failures", "Calls that it failed", lambda one: one.failures),
    Family("agentspec_member_draft_tokens", "Drafted by our plug-in in it", lambda one: one.drafted, "source"),
    Family("agentspec_member_accepted_tokens", "Those accepted", lambda one: one.accepted, "source"),
)

INDEX: tuple[Family[IndexFigures], ...] = (
    _gauge("agentspec_index_bytes", "Memory of the token index", lambda one: one.bytes),
    _gauge("agentspec_index_sequences", "Sequences in the token index", lambda one: one.sequences),
    _gauge("agentspec_cache_damaged_rows", "Rows that cannot be read, and are left out", lambda one: one.damaged),
    _gauge("agentspec_cache_unread_rows", "Rows that are not in the index yet, at most", lambda one: one.unread),
    _gauge("agentspec_cache_behind_seconds", "Age of what the index has not taken in", lambda one: one.behind),
    _gauge("agentspec_cache_erasure_pending", "1 until deleted bytes are erased", lambda one: one.erasure_pending),
)


def _by_position(lengths: Mapping[int, int]) -> dict[str, int]:
    """How many drafts had a token accepted at each depth, of drafts by their accepted length."""
    depths = range(max(lengths, default=0))
    return {str(depth): sum(count for length, count in lengths.items() if length > depth) for depth in depths}


class Registry(CollectorRegistry):
    """A registry without the times at which series began: a second series for each, which nobody asks for."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield metric


class OnScrape(Collector, Generic[S]):
    """The `families` of what `samples` returns at a scrape; `labels` name the attributes that become labels."""

    def __init__(self, families: Iterable[Family[S]], samples: Callable[[], Iterable[S]], **labels: str) -> None:
        self._families, self._samples, self._labels = families, samples, labels

    def collect(self) -> Iterator[Metric]:
        found = [(one, [getattr(one, attribute) for attribute in self._labels.values()]) for one in self._samples()]
        for family in self._families if found else ():
            kind = GaugeMetricFamily if family.falls else CounterMetricFamily
            labels = [*self._labels, *([family.by] if family.by else [])]
            metric = kind(family.name, family.help, labels=labels)
            for sample, values in found:
                number = family.read(sample)
                if isinstance(number, Mapping):
                    for value, count in number.items():
                        metric.add_metric([*values, value], count)
                else:
                    metric.add_metric(values, number)
            yield metric

    def describe(self) -> list[Metric]:
        return []
